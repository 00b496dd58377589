# qshim: `make` builds build/libqshim.so, `make check` tests it, `make help` lists the rest.
#
# Needs GNU make, gcc, a CUDA toolkit from 12.0 on (scripts/cuda finds it) and Check, inih, xxhash,
# jansson and libelf; scripts/setup installs what is missing. No GPU is needed to build and test.
# Variables for the command line: B CC NVCC CUDA_HOME CFLAGS LDFLAGS NVCCFLAGS PREFIX DESTDIR V.

B      ?= build
PREFIX ?= /usr/local
ifeq ($(origin CC),default)
CC := gcc
endif
ifeq ($(origin AR),default)
AR := gcc-ar
endif
CFLAGS    ?= -O2 -g
NVCCFLAGS ?= -O3

comma := ,

# ---- toolkit ------------------------------------------------------------------------------------

CUDA := $(shell NVCC='$(NVCC)' CUDA_HOME='$(CUDA_HOME)' scripts/cuda)
word_of = $(patsubst $(1)=%,%,$(filter $(1)=%,$(CUDA)))
override NVCC := $(call word_of,nvcc)
CUDA_INCLUDE  := $(addprefix -isystem ,$(call word_of,include))
CUDA_LIBS     := $(call word_of,cudart) $(call word_of,cublas) $(call word_of,cublasLt)

# Goals that work, or say better what is wrong, without a toolkit.
ifeq ($(NVCC),)
ifneq ($(filter-out check demo clean help uninstall,$(or $(MAKECMDGOALS),all)),)
$(error no CUDA toolkit found: run scripts/setup, which installs one, or set CUDA_HOME)
endif
endif

# One machine code for each generation that differs for these kernels; code for 8.9, 10.0 and 12.0
# runs on all later members of the same major version, PTX on everything else. 9.0a is Hopper only.
GPUS     := 80 89 90a 100 120
GPU_CODE := $(if $(NVCC),$(shell $(NVCC) --list-gpu-code))
GPUS     := $(foreach gpu,$(GPUS),$(if $(filter sm_$(gpu:a=),$(GPU_CODE)),$(gpu)))
GENCODE  := $(foreach gpu,$(GPUS),-gencode arch=compute_$(gpu),code=sm_$(gpu)) \
            $(foreach gpu,80 89,-gencode arch=compute_$(gpu),code=compute_$(gpu))

# Commands are shown short; `make V=1` shows them whole.
ifdef V
say = @:
else
Q   := @
say = @printf '  %-5s %s\n'
endif

# ---- flags --------------------------------------------------------------------------------------

WARNINGS := -Wall -Wextra -Wshadow -Wconversion
ifdef ASAN
override CFLAGS += -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
endif
ifdef FUZZ
override CFLAGS += -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all
endif
# What every object is built with, tests and emulation too (their folders' build.mk use these).
QS_CPPFLAGS := -Isrc -I. -Itests $(CUDA_INCLUDE) -MMD -MP
QS_CFLAGS   := -std=gnu17 $(CFLAGS) -fPIC -fvisibility=hidden $(WARNINGS)
# Thread-local variables at a fixed offset: no call, and no allocation at a thread's first product.
# Unwind tables whatever CFLAGS are: a C++ exception may pass through us.
LIB_CFLAGS  := -ftls-model=initial-exec -fasynchronous-unwind-tables
QS_LDFLAGS  := $(LDFLAGS) $(filter -fsanitize% -m%,$(CFLAGS))
# inih and xxhash are linked statically, so that no program meets a second copy of either.
STATIC_LIBS := -l:libinih.a -l:libxxhash.a

# Changes whenever the commands do, so that a build folder never holds objects of two kinds.
FLAGS := $(B)/flags
FLAGS_NOW := $(CC) $(QS_CPPFLAGS) $(CPPFLAGS) $(QS_CFLAGS) $(LIB_CFLAGS) $(QS_LDFLAGS)
ifneq ($(filter-out clean help uninstall,$(or $(MAKECMDGOALS),all)),)
$(shell mkdir -p $(B))
ifneq ($(file <$(FLAGS)),$(FLAGS_NOW))
$(file >$(FLAGS),$(FLAGS_NOW))
endif
endif

# ---- library ------------------------------------------------------------------------------------

PARTS    := intercept gemm policy plan engine operand device note
LIB_SRC  := $(wildcard $(PARTS:%=src/%/*.c) $(PARTS:%=src/%/*.S))
LIB_OBJ  := $(LIB_SRC:%=$(B)/obj/%.o)
CLI_SRC  := $(wildcard src/cli/*.c src/cli/*.S)
CLI_OBJ  := $(CLI_SRC:%=$(B)/obj/%.o)
KERNELS  ?= $(B)/kernels
FATBINS  := $(patsubst kernels/%.cu,$(KERNELS)/%.fatbin,$(wildcard kernels/*.cu))
LIB      := $(B)/libqshim.so
ARCHIVE  := $(B)/libqshim.a
CLI      := $(if $(CLI_SRC),$(B)/qshim)

.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
.SUFFIXES:

all: $(LIB) $(ARCHIVE) $(CLI) ## the library, its objects as an archive, the command (default)

$(LIB_OBJ): QS_CFLAGS += $(LIB_CFLAGS)
# A sanitiser's runtime starts by asking our dlsym, before instrumented code can run.
$(B)/obj/src/intercept/loader.c.o: QS_CFLAGS += -fno-sanitize=all

$(B)/obj/%.c.o: %.c $(FLAGS)
	@mkdir -p $(@D)
	$(say) CC $<
	$(Q)$(CC) $(QS_CPPFLAGS) $(CPPFLAGS) $(QS_CFLAGS) -c $< -o $@

$(B)/obj/%.S.o: %.S $(FLAGS)
	@mkdir -p $(@D)
	$(say) AS $<
	$(Q)$(CC) $(QS_CPPFLAGS) $(CPPFLAGS) $(QS_CFLAGS) -Wa,-I,$(KERNELS) -c $< -o $@

# What the assembler says of each kernel (registers, shared memory, spills) is kept beside the code;
# scripts/lint reads it. Warnings are shown too.
$(KERNELS)/%.fatbin: kernels/%.cu
	@mkdir -p $(@D)
	$(say) NVCC "$< ($(GPUS))"
	$(Q)$(NVCC) -fatbin $(GENCODE) $(NVCCFLAGS) -std=c++17 -allow-unsupported-compiler -I. \
		-Xptxas -v -MMD -MP -MT $@ -MF $(@:.fatbin=.d) $< -o $@ 2>$(@:.fatbin=.log); \
	status=$$?; sed '/^ptxas info    : [^(]/d; /bytes stack frame/d' $(@:.fatbin=.log) >&2; \
	exit $$status

# Files included by the assembler are not in its dependency files.
$(B)/obj/src/device/embed.S.o: $(FATBINS)
$(B)/obj/src/policy/preset_text.S.o: $(wildcard config/*.ini)
$(B)/obj/src/cli/sitecustomize.S.o: src/cli/sitecustomize.py

# Shared and archive come from the same objects; the archive lets a test reach inside.
$(LIB): $(LIB_OBJ) src/qshim.map
	$(say) LD $@
	$(Q)$(CC) $(QS_LDFLAGS) -shared -Wl,-soname,libqshim.so.0 -Wl,--version-script=src/qshim.map \
		-Wl,-z,now -Wl,-z,relro -Wl,-z,noexecstack -Wl,--no-undefined -Wl,--exclude-libs,ALL \
		-Wl,--as-needed $(LIB_OBJ) $(STATIC_LIBS) -lpthread -ldl -o $@

$(ARCHIVE): $(LIB_OBJ)
	@rm -f $@
	$(say) AR $@
	$(Q)$(AR) rcs $@ $^

# The archive defines dlsym and the cuBLAS entry points, as the shared library does. A program with
# the archive inside must get libc's and the toolkit's, hence the order: those first.
LINK_ARCHIVE = -lc $(ARCHIVE) $(STATIC_LIBS)

$(CLI): $(CLI_OBJ) $(ARCHIVE)
	$(say) LD $@
	$(Q)$(CC) $(QS_LDFLAGS) $(CLI_OBJ) -Wl,--as-needed $(LINK_ARCHIVE) -ljansson -lelf -lm -lpthread \
		-ldl -o $@

# ---- tests --------------------------------------------------------------------------------------

# Check is linked statically everywhere: the GPU suite runs on machines that do not have it.
static_lib  = $(firstword $(wildcard $(foreach name,$(1),$(shell $(CC) -print-file-name=$(name)))))
CHECK_LIBS := $(call static_lib,libcheck_pic.a libcheck.a) $(call static_lib,libsubunit.a) -lrt \
              -lm -lpthread

names      = $(patsubst tests/$(1)/%.c,%,$(wildcard tests/$(1)/$(2).c))
UNIT      := $(addprefix $(B)/tests/unit/,$(call names,unit,test_*))
ORACLE    := $(patsubst %.c,$(B)/obj/%.c.o,$(wildcard tests/oracle/*.c))
SUPPORT   := $(patsubst %.c,$(B)/obj/%.c.o,$(wildcard tests/support/*.c))
GPU_TESTS := $(addprefix $(B)/gpu/,$(call names,gpu,test_*))
GPU_BENCH := $(addprefix $(B)/gpu/,$(call names,gpu,bench_*))
FUZZERS   := $(addprefix $(B)/fuzz/,$(call names,fuzz,fuzz_*))

# The emulation of CUDA: its libraries, the programs that run on it, the tests of both.
SOFTCUDA_DIR  := $(B)/softcuda
SOFTCUDA      := $(if $(wildcard tests/softcuda/build.mk),$(addprefix $(SOFTCUDA_DIR)/,libcuda.so.1 \
                 libcudart.so.13 libcublas.so.13 libcublasLt.so.13))
SOFTCUDA_LINK  = -Wl,-rpath-link,$(SOFTCUDA_DIR) $(SOFTCUDA)
ifneq ($(SOFTCUDA),)
SOFT_TESTS    := $(addprefix $(B)/tests/softcuda/,$(call names,softcuda,test_*))
APPS          := $(addprefix $(B)/apps/,$(call names,apps,*))
endif
# build.mk of a folder of tests adds programs to CPU_TESTS, or what they need to INTERCEPT_NEEDS.
INTERCEPT     := $(addprefix $(B)/tests/intercept/,$(call names,intercept,test_*))
INTERCEPT_NEEDS :=
CPU_TESTS     := $(UNIT) $(SOFT_TESTS) $(INTERCEPT)

include $(wildcard tests/*/build.mk)

$(UNIT): $(B)/tests/unit/%: $(B)/obj/tests/unit/%.c.o $(ORACLE) $(SUPPORT) $(ARCHIVE)
	@mkdir -p $(@D)
	$(say) LD $@
	$(Q)$(CC) $(QS_LDFLAGS) $(filter %.o,$^) $(CHECK_LIBS) $(LINK_ARCHIVE) -lm -ldl -o $@

$(SOFT_TESTS): $(B)/tests/softcuda/%: $(B)/obj/tests/softcuda/%.c.o $(ORACLE) $(SUPPORT) \
                                      $(SOFTCUDA) $(ARCHIVE)
	@mkdir -p $(@D)
	$(say) LD $@
	$(Q)$(CC) $(QS_LDFLAGS) $(filter %.o,$^) $(CHECK_LIBS) -Wl,-rpath,'$$ORIGIN/../../softcuda' \
		$(SOFTCUDA_LINK) $(LINK_ARCHIVE) -lm -ldl -o $@

$(INTERCEPT): $(B)/tests/intercept/%: $(B)/obj/tests/intercept/%.c.o $(SUPPORT) $(ARCHIVE)
	@mkdir -p $(@D)
	$(say) LD $@
	$(Q)$(CC) $(QS_LDFLAGS) $(filter %.o,$^) $(CHECK_LIBS) $(LINK_ARCHIVE) -lm -ldl -o $@

# Programs know no path to CUDA: LD_LIBRARY_PATH gives them the emulation or the real libraries.
$(APPS): $(B)/apps/%: $(B)/obj/tests/apps/%.c.o $(SOFTCUDA)
	@mkdir -p $(@D)
	$(say) LD $@
	$(Q)$(CC) $(QS_LDFLAGS) $< $(SOFTCUDA_LINK) -lm -ldl -lpthread -o $@

# The toolkit's libraries are the fallback; LD_LIBRARY_PATH wins, here and on another machine.
$(GPU_TESTS) $(GPU_BENCH): $(B)/gpu/%: $(B)/obj/tests/gpu/%.c.o $(ORACLE) $(SUPPORT) $(ARCHIVE)
	@mkdir -p $(@D)
	$(say) LD $@
	$(Q)$(CC) $(QS_LDFLAGS) $(filter %.o,$^) $(CHECK_LIBS) -Wl,--allow-shlib-undefined $(CUDA_LIBS) \
		$(addprefix -Wl$(comma)-rpath$(comma),$(sort $(dir $(CUDA_LIBS)))) $(LINK_ARCHIVE) -lm -ldl -o $@

$(FUZZERS): $(B)/%: $(B)/obj/tests/%.c.o $(filter-out %/main.c.o,$(CLI_OBJ)) $(ARCHIVE)
	@mkdir -p $(@D)
	$(say) LD $@
	$(Q)$(CC) $(LDFLAGS) -fsanitize=fuzzer,address,undefined $(filter %.o,$^) $(LINK_ARCHIVE) \
		-ljansson -lelf -lm -ldl -o $@

tests: all $(CPU_TESTS) $(INTERCEPT_NEEDS) $(SOFTCUDA) $(APPS) ## build the CPU tests
gpu: all $(GPU_TESTS) $(GPU_BENCH) $(SOFTCUDA) $(APPS) ## build the GPU tests and benchmarks

# A sanitised library wants its runtime first among those loaded, also where it is preloaded.
TEST_ENV = QS_TEST_BUILD='$(abspath $(B))' \
           QS_TEST_FIRST=test_kept \
           QS_TEST_PRELOAD_FIRST='$(if $(ASAN),$(realpath $(shell $(CC) -print-file-name=libasan.so)))'

# The second make sees what scripts/setup has just installed.
check: ## build everything and run the CPU tests; installs what is missing
	@scripts/setup
	@$(MAKE) --no-print-directory check-built

# A sanitiser has nothing to see in Python.
check-built: tests
	@$(TEST_ENV) tests/run tests/support/test_run $(if $(ASAN),$(filter-out %.py,$(CPU_TESTS)),$(CPU_TESTS))

asan: ## the CPU tests again, with AddressSanitizer and UBSan, in build/asan
	@$(MAKE) --no-print-directory B=$(B)/asan KERNELS=$(KERNELS) ASAN=1 check-built

FUZZ_SECONDS ?= 60
fuzz: ## the readers of foreign text under libFuzzer (clang), FUZZ_SECONDS each
	@$(MAKE) --no-print-directory B=$(B)/fuzzing KERNELS=$(KERNELS) CC=clang FUZZ=1 fuzz-built

fuzz-built: $(FUZZERS)
	@for program in $(FUZZERS); do \
		echo "  FUZZ  $$program for $(FUZZ_SECONDS) s"; \
		$$program -max_total_time=$(FUZZ_SECONDS) -artifact_prefix=$$program. \
			>$$program.log 2>&1 || { tail -n 40 $$program.log; exit 1; }; done

check-gpu: gpu ## the tests that need a GPU; says what it skipped
	@$(TEST_ENV) QS_TEST_JOBS=1 tests/run $(GPU_TESTS) $(wildcard tests/gpu/run.py)

bench: tests gpu ## the benchmarks that need no PyTorch; scripts/bench_*.py are the others
	@B='$(abspath $(B))' scripts/bench_overhead
	@status=0; for program in $(GPU_BENCH); do \
		echo "== $$program"; $$program || status=1; \
	done; exit $$status

demo: ## the same program with and without qshim, on the GPU or on the emulation
	@scripts/setup
	@$(MAKE) --no-print-directory demo-built

demo-built: all $(SOFTCUDA) $(APPS)
	@$(TEST_ENV) scripts/demo

lint: all ## exported symbols, dependencies, constructors, formatting, shell scripts
	@QS_TEST_BUILD='$(abspath $(B))' scripts/lint

# ---- install ------------------------------------------------------------------------------------

install: all ## into $(DESTDIR)$(PREFIX)
	install -d '$(DESTDIR)$(PREFIX)/lib' '$(DESTDIR)$(PREFIX)/share/qshim'
	install -m 755 $(LIB) '$(DESTDIR)$(PREFIX)/lib/libqshim.so.0'
	ln -sf libqshim.so.0 '$(DESTDIR)$(PREFIX)/lib/libqshim.so'
	install -m 644 $(wildcard config/*.ini) '$(DESTDIR)$(PREFIX)/share/qshim'
ifneq ($(CLI),)
	install -d '$(DESTDIR)$(PREFIX)/bin'
	install -m 755 $(CLI) '$(DESTDIR)$(PREFIX)/bin/qshim'
endif
# LD_PRELOAD=libqshim.so without a path finds what is in the loader's cache.
	@[ -n '$(DESTDIR)' ] || [ "$$(id -u)" -ne 0 ] || ldconfig

uninstall: ## what install put there
	rm -f '$(DESTDIR)$(PREFIX)/lib/libqshim.so' '$(DESTDIR)$(PREFIX)/lib/libqshim.so.0' \
		'$(DESTDIR)$(PREFIX)/bin/qshim'
	rm -rf '$(DESTDIR)$(PREFIX)/share/qshim'

clean: ## what was built, but not a toolkit that scripts/setup installed
	rm -rf $(filter-out $(B)/cuda,$(wildcard $(B)/*))

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' \
		Makefile $(wildcard tests/*/build.mk)

.PHONY: all tests gpu check check-built check-gpu demo demo-built bench lint asan \
        fuzz fuzz-built install uninstall clean help
.SECONDARY:

-include $(shell find $(B)/obj $(KERNELS) -name '*.d' 2>/dev/null)
