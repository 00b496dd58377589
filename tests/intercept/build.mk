# Programs and libraries that the tests here run under the shim, in $(B)/intercept. They know no path
# to CUDA or to each other: the tests give them one by LD_LIBRARY_PATH.

INTERCEPT_DIR := $(B)/intercept
I_SRC         := tests/intercept
I_OBJ         := $(B)/obj/tests/intercept

# Against which copy of cuBLAS something is linked.
I_CUDART := $(SOFTCUDA_DIR)/libcudart.so.13
I_NEW    := $(SOFTCUDA_DIR)/libcublas.so.13 $(SOFTCUDA_DIR)/libcublasLt.so.13
I_OLD    := $(B)/softcuda12/libcublas.so.12 $(B)/softcuda12/libcublasLt.so.12

I_LIBS     := $(addprefix $(INTERCEPT_DIR)/lib,snippet.so snippet12.so snippet_dlsym.so \
              constructor.so plugin_inner.so plugin.so wrap_gemm.so wrap_dlsym.so wrap_calls.so \
              wrap_leave.so)
I_PROGRAMS := $(addprefix $(INTERCEPT_DIR)/,host linked linked_by_library linked_by_constructor \
              bench_calls track_kernels leave)
INTERCEPT_NEEDS += $(LIB) $(I_LIBS) $(I_PROGRAMS) $(INTERCEPT_DIR)/libcatch.so

# What runs the programs is part of every test.
$(INTERCEPT): $(I_OBJ)/run.c.o
$(I_OBJ)/run.c.o: private CPPFLAGS += \
	-DTOOLKIT_LIB='"$(or $(patsubst %/,%,$(dir $(firstword $(call word_of,cublas)))),/nowhere)"'

$(I_OBJ)/snippet_dlsym.c.o: $(I_SRC)/snippet.c $(FLAGS)
	@mkdir -p $(@D)
	$(say) CC "$< ($(@F))"
	$(Q)$(CC) $(QS_CPPFLAGS) $(CPPFLAGS) $(QS_CFLAGS) -DBY_DLSYM -c $< -o $@

$(I_OBJ)/plugin_inner.c.o: $(I_SRC)/plugin.c $(FLAGS)
	@mkdir -p $(@D)
	$(say) CC "$< ($(@F))"
	$(Q)$(CC) $(QS_CPPFLAGS) $(CPPFLAGS) $(QS_CFLAGS) -DINNER -c $< -o $@

$(INTERCEPT_DIR)/libsnippet.so:         $(I_OBJ)/snippet.c.o $(I_NEW) $(I_CUDART)
$(INTERCEPT_DIR)/libsnippet12.so:       $(I_OBJ)/snippet.c.o $(I_OLD) $(I_CUDART)
$(INTERCEPT_DIR)/libsnippet_dlsym.so:   $(I_OBJ)/snippet_dlsym.c.o $(I_CUDART)
$(INTERCEPT_DIR)/libconstructor.so:     $(I_OBJ)/constructor.c.o $(I_OBJ)/snippet.c.o $(I_NEW) $(I_CUDART)
$(INTERCEPT_DIR)/libwrap_leave.so:      $(I_OBJ)/wrap_leave.c.o $(I_NEW)
$(INTERCEPT_DIR)/libplugin.so:          $(I_OBJ)/plugin.c.o $(INTERCEPT_DIR)/libplugin_inner.so
$(patsubst %,$(INTERCEPT_DIR)/lib%.so,plugin_inner wrap_gemm wrap_dlsym wrap_calls): \
$(INTERCEPT_DIR)/lib%.so: $(I_OBJ)/%.c.o

$(I_LIBS):
	@mkdir -p $(@D)
	$(say) LD $@
	$(Q)$(CC) $(QS_LDFLAGS) -shared -Wl,-soname,$(@F) $(filter %.o,$^) -Wl,--no-as-needed \
		-Wl,--allow-shlib-undefined $(call I_LINK,$^) -ldl -o $@

$(INTERCEPT_DIR)/libcatch.so: $(I_SRC)/catch.cc $(FLAGS)
	@mkdir -p $(@D)
	$(say) CXX $<
	$(Q)$(CXX) -O2 -g -fPIC -fvisibility=hidden -Wall -Wextra -shared -Wl,-soname,$(@F) $< -o $@

$(INTERCEPT_DIR)/host:                  $(I_OBJ)/host.c.o $(I_OBJ)/snippet_dlsym.c.o $(I_CUDART)
$(INTERCEPT_DIR)/linked:                $(I_OBJ)/linked.c.o $(I_OBJ)/snippet.c.o $(I_NEW) $(I_CUDART)
$(INTERCEPT_DIR)/linked_by_library:     $(I_OBJ)/linked.c.o $(INTERCEPT_DIR)/libsnippet.so
$(INTERCEPT_DIR)/linked_by_constructor: $(I_OBJ)/linked.c.o $(INTERCEPT_DIR)/libconstructor.so
$(INTERCEPT_DIR)/bench_calls:           $(I_OBJ)/bench_calls.c.o $(I_NEW) $(I_CUDART)
$(INTERCEPT_DIR)/leave:                 $(I_OBJ)/leave.c.o $(I_NEW) $(I_CUDART)
$(INTERCEPT_DIR)/track_kernels:         $(I_OBJ)/track_kernels.c.o $(I_NEW) $(I_CUDART) \
                                        $(SOFTCUDA_DIR)/libcuda.so.1

$(I_PROGRAMS):
	@mkdir -p $(@D)
	$(say) LD $@
	$(Q)$(CC) $(QS_LDFLAGS) $(filter %.o,$^) -Wl,--no-as-needed -Wl,--allow-shlib-undefined \
		$(call I_LINK,$^) -ldl -o $@

# By name and folder, so that what is recorded is the soname.
I_LINK = $(filter %.so %.so.1 %.so.12 %.so.13,$(1))

# ---- the submission epoch: a driver that remembers, and the library with a way in for tests ----

I_RECORDER := $(INTERCEPT_DIR)/recorder/libcuda.so.1
I_EPOCH    := $(addprefix $(INTERCEPT_DIR)/,libqshim_open.so libepoch.so libstub.so libwrap_launch.so \
              libcudart.so.12 epoch_linked epoch_plugin epoch_trust track_forms)
INTERCEPT_NEEDS += $(I_RECORDER) $(I_EPOCH)

# Without a version script, the exports are those that the sources mark, the tests' among them.
$(INTERCEPT_DIR)/libqshim_open.so: $(LIB_OBJ) $(I_OBJ)/epoch_open.c.o $(I_OBJ)/track_open.c.o
	@mkdir -p $(@D)
	$(say) LD $@
	$(Q)$(CC) $(QS_LDFLAGS) -shared -Wl,-soname,$(@F) -Wl,-z,now -Wl,--exclude-libs,ALL $^ \
		$(STATIC_LIBS) -lpthread -ldl -o $@

$(I_RECORDER): $(I_OBJ)/recorder.c.o
	@mkdir -p $(@D)
	$(say) LD $@
	$(Q)$(CC) $(QS_LDFLAGS) -shared -Wl,-soname,$(@F) -Wl,-Bsymbolic $^ -o $@

$(INTERCEPT_DIR)/libcudart.so.12:   $(I_OBJ)/plugin_inner.c.o
$(INTERCEPT_DIR)/libstub.so:        $(I_OBJ)/stub.c.o
$(INTERCEPT_DIR)/libwrap_launch.so: $(I_OBJ)/wrap_launch.c.o
$(INTERCEPT_DIR)/libepoch.so:       $(I_OBJ)/epoch_calls.c.o $(I_RECORDER)
$(INTERCEPT_DIR)/epoch_linked:      $(I_OBJ)/epoch_linked.c.o $(INTERCEPT_DIR)/libepoch.so
$(INTERCEPT_DIR)/epoch_plugin:      $(I_OBJ)/epoch_plugin.c.o
$(INTERCEPT_DIR)/epoch_trust:       $(I_OBJ)/epoch_trust.c.o $(I_NEW) $(I_CUDART)
$(INTERCEPT_DIR)/track_forms:       $(I_OBJ)/track_forms.c.o $(I_RECORDER)

# The old kind of run path, which comes before LD_LIBRARY_PATH and its libcuda.so.1.
$(filter-out %/libqshim_open.so,$(I_EPOCH)):
	@mkdir -p $(@D)
	$(say) LD $@
	$(Q)$(CC) $(QS_LDFLAGS) $(if $(filter lib%,$(@F)),-shared -Wl$(comma)-soname$(comma)$(@F)) \
		$(filter %.o,$^) -Wl,--no-as-needed -Wl,--allow-shlib-undefined \
		-Wl,--disable-new-dtags '-Wl,-rpath,$$ORIGIN/recorder' $(call I_LINK,$^) \
		-lpthread -ldl -o $@
