/* softcuda: a CUDA that needs no GPU: libcuda, libcudart, libcublas and libcublasLt in plain C.
 *
 * The four libraries have the real sonames and symbol versions and are built against the toolkit's
 * own headers, so a program (or a preloaded library) linked for CUDA runs on them unchanged. What
 * follows is what they offer; anything not named is absent, and a program that needs it fails to
 * link or gets CUDA_ERROR_NOT_FOUND from cuGetProcAddress.
 *
 * Memory.   Device memory is host memory, 512-byte aligned, filled with 0xA5 when allocated and
 *   followed by guard bytes that are checked when it is freed (counter "overruns"). Every
 * allocation is in a table: pointer attributes, address ranges, cuMemGetInfo and argument checks
 * come from it. Pageable host memory behaves as on hardware: copied from at once, copied to
 * synchronously.
 *
 * Order.    Nothing runs when it is asked for. Each stream has a queue; launches, copies, memsets,
 *   products, host functions and event records wait there with their arguments by value until
 *   something synchronises, and then run in a pseudo-random order (knob "seed") that respects only
 *   what CUDA guarantees: order within a stream, event waits, and the legacy default stream against
 *   blocking streams. A query runs a little of it. Code that forgets a dependency therefore fails
 *   here soon, and reproducibly. What runs does so one at a time, on the thread that waits.
 *
 * Contexts. Two devices; one primary context each, further ones by cuCtxCreate. A thread has no
 *   current context until it sets one or makes its first runtime call. Ids of contexts, streams and
 *   captures are never reused, handles are. Work that touches memory which is not the device's
 *   breaks the context: every later call answers CUDA_ERROR_ILLEGAL_ADDRESS. After fork(), a child
 *   of a process that had called cuInit gets CUDA_ERROR_NOT_INITIALIZED from everything.
 *
 * Capture.  Global, thread-local and relaxed; fork and join by events; arguments by value; the
 *   errors 900 to 908 with the driver's effect on the capture; instantiation, launches in any
 *   topological order, user objects that live until the graph and its executables are gone.
 *
 * Kernels.  Any image loads. A function is found if tests/oracle/ has a reference of its name, or
 *   if it is one of softcuda's own:
 *     softcuda_fill(uint64_t target, uint32_t value, uint64_t count)   32-bit words
 *     softcuda_copy(uint64_t target, uint64_t source, uint64_t bytes)
 *     softcuda_add(uint64_t target, float value, uint64_t count)       floats, in place
 *     softcuda_fill_each({uint32_t count, value; uint64_t target[3]})  words, a struct by value
 *     ncclDevKernel_softcuda_fill                                      softcuda_fill, named so
 *
 * Graphs.   Besides captured ones: nodes of kernels, copies and fills of one row, and child graphs,
 *   added by hand; the parameters of nodes; whole updates, and of kernel nodes, of an executable
 *   that has no launch queued.
 *
 * cuBLAS.   cublasCreate Destroy SetStream GetStream SetPointerMode GetPointerMode SetMathMode
 *   GetMathMode SetAtomicsMode GetAtomicsMode SetWorkspace SetSmCountTarget GetSmCountTarget
 *   GetVersion GetProperty GetCudartVersion GetStatusName GetStatusString; Sgemm, SgemmEx, GemmEx,
 *   GemmBatchedEx, GemmStridedBatchedEx, GemmGroupedBatchedEx, each also _64. bf16, fp16 and fp32
 *   operands (A and B alike), output of the same type or fp32, fp32 accumulation.
 *
 * cuBLASLt. cublasLtCreate Destroy GetVersion GetProperty GetCudartVersion GetStatusName
 *   GetStatusString, MatmulDesc*, MatrixLayout*, MatmulPreference*, MatmulAlgoGetHeuristic,
 *   MatmulAlgoCheck, Matmul. bf16, fp16, fp32 and fp8 operands, row and column order, strided
 *   batches, scalar scales and outer vectors, epilogues DEFAULT RELU BIAS RELU_BIAS GELU GELU_BIAS
 *   GELU_AUX GELU_AUX_BIAS DGELU. An algorithm scribbles over the workspace it was promised before
 *   it reads its operands.
 *   Refused with status 15: ReLU masks, bias gradients, block scales, fp8 output, vector pointer
 *   modes; and with fp8 operands what an H200 refuses: all but TN (capabilities 10.x and 11.x
 *   take every layout), e5m2 by e5m2, a C of another type than D, a bias that has not D's type
 *   (bf16 where D is fp32), pointers and leading dimensions off 16 bytes, an outer vector on one
 *   side only. The manual's further rules, k a multiple of 16 and m of 16 bytes, hold while the
 *   knob "strict" is on: the device was seen to accept shapes beyond them, and what relies on that
 *   should be noticed.
 *
 * Left out: textures and arrays, memory pools other than the default, IPC, peer
 * access (peer copies work), copies of rows with hosts or arrays, editing of graphs, the _ptsz
 * forms of functions, cudaLaunchKernel (no device code is registered), block scales, complex and
 * integer products. The copies of cuBLAS with the names of CUDA 12 use the same libcudart.so.13 as
 * the others.
 *
 * Knobs are set by environment variables SOFTCUDA_<NAME>, read when the library is loaded, and by
 * softcuda_set(). Default in brackets.
 *   seed              of the order in which streams run [1]
 *   fail_alloc        N: the Nth device allocation from now on fails, and all after; 0 = none [0]
 *   reuse             1: device memory that was freed last is given to the next who wants as much
 *                     [0]
 *   memory_mib        memory of each device [8192]
 *   capability        compute capability, major * 10 + minor [90]
 *   ptx               that for which kernels were compiled; 0 = the device's [0]
 *   driver            what cuDriverGetVersion reports [13000]; from 12030 on with edges of all
 *                     kinds, before 12000 without cuTensorMapEncodeTiled
 *   cublaslt_version  what cublasLtGetVersion of major 13 reports and allows [130100]
 *   cublaslt12_version  the same of major 12 [120900]
 *   heuristics_empty  1: heuristics find nothing, 2: only for fp8 [0]
 *   fail_fp8          the status cublasLtMatmul answers to fp8 operands; 0 = works [0]
 *   fail_module       the error cuModuleLoadData and cuLibraryLoadData answer [0]
 *   fail_launch       the error launches of kernels (not products) answer [0]
 *   null_products     1: GemmEx and cublasLtMatmul return success at once and do nothing [0]
 *   inner_lt          1: cublasGemmEx calls cublasLtMatmul, through the dynamic linker [0]
 *   strict            1: fp8 alignment rules of the manual [1]
 *   fail_product      N: the Nth product submitted from now on fails; 0 = none [0]
 *   fail_event        N: the Nth time from now on that an event is created or recorded fails [0]
 *   hold_host         1: no host function runs, and their streams wait for it [0]
 *   idle_products     1: products take their turn and their time, but compute nothing [0]
 *   idle_kernels      1: the same of all other kernels [0]
 *   fp8_error         N: products compute nothing and fill D with 100, those of fp8 operands with
 *                     100 + N, or 100 + N / 4 if each row has a scale of its own; 0 = they work [0]
 *   product_us fp8_us second_us wide_second_us kernel_us
 *                     microseconds that a product takes, one of fp8 operands, either by the second
 *                     algorithm of a heuristic (the one without workspace), one of others by it if
 *                     that is not the same, and any other kernel.
 *                     Once one of them is set, events tell these instead of the host's time: the
 *                     sum over the work of their stream, where all else takes no time [0]
 *   slow_product      N: the Nth product to run from now on takes ten times as long; 0 = none [0]
 *   counters          setting it to anything zeroes the counters
 *
 * Counters, by softcuda_get(); names of knobs work too.
 *   launches          kernel launches, captured ones included, products not
 *   kernel:<name>     the same by name
 *   early_launches    launches that may start before the work ahead of them ends (they never do)
 *   early_reads       products of few tokens that then read what must be complete when they are
 *                     launched: if it is something else when they run, they break the context
 *   early_edges       edges of captured launches that may start early: after one kernel; anything
 *                     else spoils the capture
 *   products          products submitted, captured ones included
 *   products_bf16 products_fp16 products_fp32 products_fp8   the same by type of A
 *   products_first products_second  products by an algorithm of a heuristic, the second being the
 *                     one without workspace
 *   events            events that exist
 *   allocations frees device allocations made and given back
 *   live              device allocations that exist
 *   bytes             bytes in them
 *   overruns          freed allocations whose guard bytes were overwritten
 *   syncs             calls that waited for a stream, event, context or copy
 *   queued            pieces of work that wait to be run
 *   ran               pieces of work that were run, each node of a graph counting
 *   heuristics        calls of cublasLtMatmulAlgoGetHeuristic
 *   loose_heuristics  those that allow sums of parts in the type of the output
 *   descs, descs_destroyed  cublasLtMatmulDescCreate and -Destroy
 *   captures          captures begun
 *   graph_launches    graphs launched
 *   modules           images loaded
 */
#ifndef SOFTCUDA_H
#define SOFTCUDA_H

/* Sets a knob; an unknown name is a mistake of the test and aborts. In libcuda.so.1. */
void softcuda_set(const char *knob, long value);
/* Value of a counter or knob, -1 if there is none of that name. In libcuda.so.1. */
long softcuda_get(const char *counter);

/* Calls that one copy of libcublas or libcublasLt has received, by the name of the exported
 * function (null products are not counted); -1 if it is not counted. Each copy exports its own: ask
 * by dlsym when there are several. */
long softcuda_cublas_calls(const char *function);
long softcuda_cublaslt_calls(const char *function);

#endif
