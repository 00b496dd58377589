# tests/engine: what happens to a product, end to end on the emulation. Each program runs scenes of its
# own under the shim, so it links the emulation and nothing of the library.

ENGINE      := $(addprefix $(B)/tests/engine/,$(call names,engine,test_*))
ENGINE_OBJ  := $(patsubst %,$(B)/obj/tests/engine/%.c.o,child json kept product step tuning)
CPU_TESTS   += $(ENGINE)

$(B)/obj/tests/engine/test_traces.c.o: QS_CPPFLAGS += -DTRACES='"$(abspath tests/traces)"'

# A profiler's part of NVTX, for test_layers.
INJECTION   := $(B)/engine/libinjection.so
INTERCEPT_NEEDS += $(INJECTION)

$(B)/obj/tests/engine/test_layers.c.o: QS_CPPFLAGS += -DINJECTION='"$(abspath $(INJECTION))"' \
	-DLIBRARY='"$(abspath $(LIB))"'
$(B)/tests/engine/test_layers: | $(INJECTION)

$(INJECTION): $(B)/obj/tests/engine/injection.c.o
	@mkdir -p $(@D)
	$(say) LD $@
	$(Q)$(CC) $(QS_LDFLAGS) -shared -Wl,-soname,$(@F) $^ -o $@

$(ENGINE): $(B)/tests/engine/%: $(B)/obj/tests/engine/%.c.o $(ENGINE_OBJ) $(ORACLE) $(SOFTCUDA) $(LIB)
	@mkdir -p $(@D)
	$(say) LD $@
	$(Q)$(CC) $(QS_LDFLAGS) $(filter %.o,$^) $(CHECK_LIBS) -Wl,-rpath,'$$ORIGIN/../../softcuda' \
		-Wl,-rpath-link,$(SOFTCUDA_DIR) $(SOFTCUDA) -lm -lpthread -ldl -o $@

# Not part of `make check`: minutes, and only where several threads meet.
tsan: ## the tests of threads, streams, edits, roles and times with ThreadSanitizer, in build/tsan
	@$(MAKE) --no-print-directory B=$(B)/tsan KERNELS=$(KERNELS) CFLAGS='-O1 -g -fsanitize=thread' \
		tsan-built

tsan-built: $(addprefix $(B)/tests/engine/,test_threads test_live test_roles test_share)
	@QS_TEST_BUILD='$(abspath $(B))' TSAN_OPTIONS='suppressions=$(abspath tests/engine/tsan.supp)' \
		QS_TEST_PRELOAD_FIRST='$(realpath $(shell $(CC) -print-file-name=libtsan.so))' \
		tests/run $^

.PHONY: tsan tsan-built
