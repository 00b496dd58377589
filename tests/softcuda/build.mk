# softcuda: four CUDA libraries that need no GPU, and a second copy of cuBLAS with CUDA 12's names.
# Included by the top Makefile, which sets B, CC, CFLAGS, QS_CFLAGS and CUDA_INCLUDE. Offers:
#   SOFTCUDA_LIBS    every library, as a prerequisite of tests
#   SOFTCUDA_LDFLAGS what a program that runs on softcuda links with
# The objects of tests/oracle/ are compiled here as well, because libcuda.so.1 runs them as kernels.

SOFTCUDA_DIR    := $(B)/softcuda
SOFTCUDA12_DIR  := $(B)/softcuda12
SOFTCUDA_OBJ    := $(B)/softcuda/obj
SOFTCUDA_DRIVER := state context schedule stream event capture graph memory virtual kernel names
SOFTCUDA_ORACLE := $(patsubst tests/oracle/%.c,%,$(wildcard tests/oracle/*.c))

SOFTCUDA_LIBS := $(SOFTCUDA_DIR)/libcuda.so.1 $(SOFTCUDA_DIR)/libcudart.so.13 \
	$(SOFTCUDA_DIR)/libcublasLt.so.13 $(SOFTCUDA_DIR)/libcublas.so.13 \
	$(SOFTCUDA12_DIR)/libcublasLt.so.12 $(SOFTCUDA12_DIR)/libcublas.so.12
SOFTCUDA_LDFLAGS := -Wl,-rpath,$(abspath $(SOFTCUDA_DIR)) -L$(SOFTCUDA_DIR) \
	-l:libcublas.so.13 -l:libcublasLt.so.13 -l:libcudart.so.13 -l:libcuda.so.1

# Everything is exported but what the version script hides; -fPIC and -g whatever CFLAGS has.
SOFTCUDA_CC := $(CC) $(QS_CFLAGS) -fPIC -fvisibility=default -I. -Isrc -Ikernels \
	$(CUDA_INCLUDE) -MMD -MP
# NEEDED as the real libraries have it (each the next lower one), found next to the library itself.
SOFTCUDA_LD := $(CC) $(CFLAGS) -shared -Wl,-Bsymbolic -Wl,--no-as-needed \
	'-Wl,-rpath,$$ORIGIN:$$ORIGIN/../softcuda'

softcuda_driver_objects := $(SOFTCUDA_DRIVER:%=$(SOFTCUDA_OBJ)/%.o) \
	$(SOFTCUDA_ORACLE:%=$(SOFTCUDA_OBJ)/oracle_%.o)

$(SOFTCUDA_OBJ)/%.o: tests/softcuda/%.c
	@mkdir -p $(@D)
	$(say) CC $<
	$(Q)$(SOFTCUDA_CC) -c $< -o $@

# The arithmetic of products and kernels is most of what tests take, and no sanitiser need see it.
$(SOFTCUDA_OBJ)/product.o $(SOFTCUDA_OBJ)/12_product.o: SOFTCUDA_CC += -fno-sanitize=all

$(SOFTCUDA_OBJ)/oracle_%.o: tests/oracle/%.c
	@mkdir -p $(@D)
	$(say) CC $<
	$(Q)$(SOFTCUDA_CC) -fno-sanitize=all -c $< -o $@

$(SOFTCUDA_OBJ)/12_%.o: tests/softcuda/%.c
	@mkdir -p $(@D)
	$(say) CC $<
	$(Q)$(SOFTCUDA_CC) -DSOFTCUDA_MAJOR=12 -c $< -o $@

# Version scripts: libcuda has no versions, the others have one node named like the file.
$(SOFTCUDA_OBJ)/libcuda.so.1.map: tests/softcuda/build.mk
	@mkdir -p $(@D)
	@echo '{ global: cu*; softcuda_*; local: *; };' > $@

$(SOFTCUDA_OBJ)/%.map: tests/softcuda/build.mk
	@mkdir -p $(@D)
	@echo '$* { global: cu*; softcuda_cublas*; local: *; };' > $@

$(SOFTCUDA_DIR)/libcuda.so.1: $(softcuda_driver_objects) $(SOFTCUDA_OBJ)/libcuda.so.1.map
	$(say) LD $@
	$(Q)$(SOFTCUDA_LD) -Wl,-soname,$(@F) -Wl,--version-script=$(SOFTCUDA_OBJ)/$(@F).map \
		-o $@ $(softcuda_driver_objects) -lm -lpthread

$(SOFTCUDA_DIR)/libcudart.so.13: $(SOFTCUDA_OBJ)/cudart.o $(SOFTCUDA_DIR)/libcuda.so.1 \
		$(SOFTCUDA_OBJ)/libcudart.so.13.map
	$(say) LD $@
	$(Q)$(SOFTCUDA_LD) -Wl,-soname,$(@F) -Wl,--version-script=$(SOFTCUDA_OBJ)/$(@F).map \
		-o $@ $< $(SOFTCUDA_DIR)/libcuda.so.1 -lpthread -ldl

softcuda_lower := $(SOFTCUDA_DIR)/libcudart.so.13 $(SOFTCUDA_DIR)/libcuda.so.1

$(SOFTCUDA_DIR)/libcublasLt.so.13: $(SOFTCUDA_OBJ)/cublaslt.o $(SOFTCUDA_OBJ)/product.o \
		$(softcuda_lower) $(SOFTCUDA_OBJ)/libcublasLt.so.13.map
$(SOFTCUDA12_DIR)/libcublasLt.so.12: $(SOFTCUDA_OBJ)/12_cublaslt.o $(SOFTCUDA_OBJ)/12_product.o \
		$(softcuda_lower) $(SOFTCUDA_OBJ)/libcublasLt.so.12.map
$(SOFTCUDA_DIR)/libcublas.so.13: $(SOFTCUDA_OBJ)/cublas.o $(SOFTCUDA_OBJ)/product.o \
		$(SOFTCUDA_DIR)/libcublasLt.so.13 $(softcuda_lower) $(SOFTCUDA_OBJ)/libcublas.so.13.map
$(SOFTCUDA12_DIR)/libcublas.so.12: $(SOFTCUDA_OBJ)/12_cublas.o $(SOFTCUDA_OBJ)/12_product.o \
		$(SOFTCUDA12_DIR)/libcublasLt.so.12 $(softcuda_lower) $(SOFTCUDA_OBJ)/libcublas.so.12.map

$(filter $(SOFTCUDA_DIR)/libcublas% $(SOFTCUDA12_DIR)/libcublas%,$(SOFTCUDA_LIBS)):
	@mkdir -p $(@D)
	$(say) LD $@
	$(Q)$(SOFTCUDA_LD) -Wl,-soname,$(@F) -Wl,--version-script=$(SOFTCUDA_OBJ)/$(@F).map \
		-o $@ $(filter %.o,$^) $(filter-out %.o %.map,$^) -lm -lpthread

# The tests open the second copy by path.
$(SOFT_TESTS): | $(SOFTCUDA_LIBS)

-include $(wildcard $(SOFTCUDA_OBJ)/*.d)
