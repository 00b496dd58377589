/* The driver functions that submit GPU work, or change what an address holds without any: whatever
 * could make a quantised copy out of date. Adding one is one line here and one in qshim.map.
 *
 * These are the names that libcuda.so.1 of CUDA 13.0 exports (and of 13.1, those of multicast),
 * kept from older versions or not, and so those that a program can be linked to. Look-ups by name
 * are matched by prefix (driver.c), which covers forms that are newer. Left out: editing graphs,
 * events, allocation (what new memory holds is nobody's business before something was written to
 * it).
 *
 * What their arguments say about the memory that is written is read by written.c while anything is
 * watched; those of the last group always, for what they tell must be known before there is a
 * watch.
 *
 * Read by the assembler too: nothing but macros.
 */
#ifndef QS_INTERCEPT_SUBMISSIONS_H
#define QS_INTERCEPT_SUBMISSIONS_H

/* Distinct driver functions that look-ups can be given thunks for, and of the last group. */
#define QS_LOOKUP_SLOTS 256
#define QS_KEPT_SLOTS   96
/* Bytes from one thunk to the next, and from one counter to the next. */
#define QS_THUNK_BYTES 32
#define QS_COUNT_BYTES 64

/* Launches. cuLaunchHostFunc is one: host code may write mapped memory. */
#define QS_SUBMISSION_LAUNCHES(X)                                                                  \
	X(cuLaunch)                                                                                \
	X(cuLaunchCooperativeKernel)                                                               \
	X(cuLaunchCooperativeKernelMultiDevice)                                                    \
	X(cuLaunchCooperativeKernel_ptsz)                                                          \
	X(cuLaunchGrid)                                                                            \
	X(cuLaunchGridAsync)                                                                       \
	X(cuLaunchHostFunc)                                                                        \
	X(cuLaunchHostFunc_ptsz)                                                                   \
	X(cuLaunchKernel)                                                                          \
	X(cuLaunchKernelEx)                                                                        \
	X(cuLaunchKernelEx_ptsz)                                                                   \
	X(cuLaunchKernel_ptsz)

/* Copies of every kind. */
#define QS_SUBMISSION_COPIES(X)                                                                    \
	X(cuMemcpy)                                                                                \
	X(cuMemcpy2D)                                                                              \
	X(cuMemcpy2DAsync)                                                                         \
	X(cuMemcpy2DAsync_v2)                                                                      \
	X(cuMemcpy2DAsync_v2_ptsz)                                                                 \
	X(cuMemcpy2DUnaligned)                                                                     \
	X(cuMemcpy2DUnaligned_v2)                                                                  \
	X(cuMemcpy2DUnaligned_v2_ptds)                                                             \
	X(cuMemcpy2D_v2)                                                                           \
	X(cuMemcpy2D_v2_ptds)                                                                      \
	X(cuMemcpy3D)                                                                              \
	X(cuMemcpy3DAsync)                                                                         \
	X(cuMemcpy3DAsync_v2)                                                                      \
	X(cuMemcpy3DAsync_v2_ptsz)                                                                 \
	X(cuMemcpy3DBatchAsync)                                                                    \
	X(cuMemcpy3DBatchAsync_ptsz)                                                               \
	X(cuMemcpy3DBatchAsync_v2)                                                                 \
	X(cuMemcpy3DBatchAsync_v2_ptsz)                                                            \
	X(cuMemcpy3DPeer)                                                                          \
	X(cuMemcpy3DPeerAsync)                                                                     \
	X(cuMemcpy3DPeerAsync_ptsz)                                                                \
	X(cuMemcpy3DPeer_ptds)                                                                     \
	X(cuMemcpy3D_v2)                                                                           \
	X(cuMemcpy3D_v2_ptds)                                                                      \
	X(cuMemcpyAsync)                                                                           \
	X(cuMemcpyAsync_ptsz)                                                                      \
	X(cuMemcpyAtoA)                                                                            \
	X(cuMemcpyAtoA_v2)                                                                         \
	X(cuMemcpyAtoA_v2_ptds)                                                                    \
	X(cuMemcpyAtoD)                                                                            \
	X(cuMemcpyAtoD_v2)                                                                         \
	X(cuMemcpyAtoD_v2_ptds)                                                                    \
	X(cuMemcpyAtoH)                                                                            \
	X(cuMemcpyAtoHAsync)                                                                       \
	X(cuMemcpyAtoHAsync_v2)                                                                    \
	X(cuMemcpyAtoHAsync_v2_ptsz)                                                               \
	X(cuMemcpyAtoH_v2)                                                                         \
	X(cuMemcpyAtoH_v2_ptds)                                                                    \
	X(cuMemcpyBatchAsync)                                                                      \
	X(cuMemcpyBatchAsync_ptsz)                                                                 \
	X(cuMemcpyBatchAsync_v2)                                                                   \
	X(cuMemcpyBatchAsync_v2_ptsz)                                                              \
	X(cuMemcpyDtoA)                                                                            \
	X(cuMemcpyDtoA_v2)                                                                         \
	X(cuMemcpyDtoA_v2_ptds)                                                                    \
	X(cuMemcpyDtoD)                                                                            \
	X(cuMemcpyDtoDAsync)                                                                       \
	X(cuMemcpyDtoDAsync_v2)                                                                    \
	X(cuMemcpyDtoDAsync_v2_ptsz)                                                               \
	X(cuMemcpyDtoD_v2)                                                                         \
	X(cuMemcpyDtoD_v2_ptds)                                                                    \
	X(cuMemcpyDtoH)                                                                            \
	X(cuMemcpyDtoHAsync)                                                                       \
	X(cuMemcpyDtoHAsync_v2)                                                                    \
	X(cuMemcpyDtoHAsync_v2_ptsz)                                                               \
	X(cuMemcpyDtoH_v2)                                                                         \
	X(cuMemcpyDtoH_v2_ptds)                                                                    \
	X(cuMemcpyHtoA)                                                                            \
	X(cuMemcpyHtoAAsync)                                                                       \
	X(cuMemcpyHtoAAsync_v2)                                                                    \
	X(cuMemcpyHtoAAsync_v2_ptsz)                                                               \
	X(cuMemcpyHtoA_v2)                                                                         \
	X(cuMemcpyHtoA_v2_ptds)                                                                    \
	X(cuMemcpyHtoD)                                                                            \
	X(cuMemcpyHtoDAsync)                                                                       \
	X(cuMemcpyHtoDAsync_v2)                                                                    \
	X(cuMemcpyHtoDAsync_v2_ptsz)                                                               \
	X(cuMemcpyHtoD_v2)                                                                         \
	X(cuMemcpyHtoD_v2_ptds)                                                                    \
	X(cuMemcpyPeer)                                                                            \
	X(cuMemcpyPeerAsync)                                                                       \
	X(cuMemcpyPeerAsync_ptsz)                                                                  \
	X(cuMemcpyPeer_ptds)                                                                       \
	X(cuMemcpy_ptds)

/* Fills. */
#define QS_SUBMISSION_FILLS(X)                                                                     \
	X(cuMemsetD16)                                                                             \
	X(cuMemsetD16Async)                                                                        \
	X(cuMemsetD16Async_ptsz)                                                                   \
	X(cuMemsetD16_v2)                                                                          \
	X(cuMemsetD16_v2_ptds)                                                                     \
	X(cuMemsetD2D16)                                                                           \
	X(cuMemsetD2D16Async)                                                                      \
	X(cuMemsetD2D16Async_ptsz)                                                                 \
	X(cuMemsetD2D16_v2)                                                                        \
	X(cuMemsetD2D16_v2_ptds)                                                                   \
	X(cuMemsetD2D32)                                                                           \
	X(cuMemsetD2D32Async)                                                                      \
	X(cuMemsetD2D32Async_ptsz)                                                                 \
	X(cuMemsetD2D32_v2)                                                                        \
	X(cuMemsetD2D32_v2_ptds)                                                                   \
	X(cuMemsetD2D8)                                                                            \
	X(cuMemsetD2D8Async)                                                                       \
	X(cuMemsetD2D8Async_ptsz)                                                                  \
	X(cuMemsetD2D8_v2)                                                                         \
	X(cuMemsetD2D8_v2_ptds)                                                                    \
	X(cuMemsetD32)                                                                             \
	X(cuMemsetD32Async)                                                                        \
	X(cuMemsetD32Async_ptsz)                                                                   \
	X(cuMemsetD32_v2)                                                                          \
	X(cuMemsetD32_v2_ptds)                                                                     \
	X(cuMemsetD8)                                                                              \
	X(cuMemsetD8Async)                                                                         \
	X(cuMemsetD8Async_ptsz)                                                                    \
	X(cuMemsetD8_v2)                                                                           \
	X(cuMemsetD8_v2_ptds)

/* Writes by the stream itself, callbacks, and waits: what is waited for may come from another
 * process, device or API, whose work is not seen. */
#define QS_SUBMISSION_STREAM(X)                                                                    \
	X(cuCtxWaitEvent)                                                                          \
	X(cuGreenCtxWaitEvent)                                                                     \
	X(cuStreamAddCallback)                                                                     \
	X(cuStreamAddCallback_ptsz)                                                                \
	X(cuStreamBatchMemOp)                                                                      \
	X(cuStreamBatchMemOp_ptsz)                                                                 \
	X(cuStreamBatchMemOp_v2)                                                                   \
	X(cuStreamBatchMemOp_v2_ptsz)                                                              \
	X(cuStreamWaitEvent)                                                                       \
	X(cuStreamWaitEvent_ptsz)                                                                  \
	X(cuStreamWaitValue32)                                                                     \
	X(cuStreamWaitValue32_ptsz)                                                                \
	X(cuStreamWaitValue32_v2)                                                                  \
	X(cuStreamWaitValue32_v2_ptsz)                                                             \
	X(cuStreamWaitValue64)                                                                     \
	X(cuStreamWaitValue64_ptsz)                                                                \
	X(cuStreamWaitValue64_v2)                                                                  \
	X(cuStreamWaitValue64_v2_ptsz)                                                             \
	X(cuStreamWriteValue32)                                                                    \
	X(cuStreamWriteValue32_ptsz)                                                               \
	X(cuStreamWriteValue32_v2)                                                                 \
	X(cuStreamWriteValue32_v2_ptsz)                                                            \
	X(cuStreamWriteValue64)                                                                    \
	X(cuStreamWriteValue64_ptsz)                                                               \
	X(cuStreamWriteValue64_v2)                                                                 \
	X(cuStreamWriteValue64_v2_ptsz)                                                            \
	X(cuWaitExternalSemaphoresAsync)                                                           \
	X(cuWaitExternalSemaphoresAsync_ptsz)

/* Memory that goes away, moves, or becomes another under the same address. Handles of memory are in
 * the last group. */
#define QS_SUBMISSION_MEMORY(X)                                                                    \
	X(cuFlushGPUDirectRDMAWrites)                                                              \
	X(cuGraphicsMapResources)                                                                  \
	X(cuGraphicsMapResources_ptsz)                                                             \
	X(cuGraphicsUnmapResources)                                                                \
	X(cuGraphicsUnmapResources_ptsz)                                                           \
	X(cuMemBatchDecompressAsync)                                                               \
	X(cuMemBatchDecompressAsync_ptsz)                                                          \
	X(cuMemDiscardAndPrefetchBatchAsync)                                                       \
	X(cuMemDiscardAndPrefetchBatchAsync_ptsz)                                                  \
	X(cuMemDiscardBatchAsync)                                                                  \
	X(cuMemDiscardBatchAsync_ptsz)                                                             \
	X(cuMemFree)                                                                               \
	X(cuMemFreeAsync)                                                                          \
	X(cuMemFreeAsync_ptsz)                                                                     \
	X(cuMemFreeHost)                                                                           \
	X(cuMemFree_v2)                                                                            \
	X(cuMemMapArrayAsync)                                                                      \
	X(cuMemMapArrayAsync_ptsz)                                                                 \
	X(cuMemPrefetchAsync)                                                                      \
	X(cuMemPrefetchAsync_ptsz)                                                                 \
	X(cuMemPrefetchAsync_v2)                                                                   \
	X(cuMemPrefetchAsync_v2_ptsz)                                                              \
	X(cuMemPrefetchBatchAsync)                                                                 \
	X(cuMemPrefetchBatchAsync_ptsz)                                                            \
	X(cuMemSetAccess)                                                                          \
	X(cuMulticastUnbind)

/* What must be known of graphs, functions, and memory that others can write. */
#define QS_SUBMISSION_KEPT(X)                                                                      \
	X(cuCtxDestroy)                                                                            \
	X(cuCtxDestroy_v2)                                                                         \
	X(cuCtxDetach)                                                                             \
	X(cuDestroyExternalMemory)                                                                 \
	X(cuDevicePrimaryCtxRelease)                                                               \
	X(cuDevicePrimaryCtxRelease_v2)                                                            \
	X(cuDevicePrimaryCtxReset)                                                                 \
	X(cuDevicePrimaryCtxReset_v2)                                                              \
	X(cuExternalMemoryGetMappedBuffer)                                                         \
	X(cuExternalMemoryGetMappedMipmappedArray)                                                 \
	X(cuGraphExecBatchMemOpNodeSetParams)                                                      \
	X(cuGraphExecChildGraphNodeSetParams)                                                      \
	X(cuGraphExecDestroy)                                                                      \
	X(cuGraphExecExternalSemaphoresWaitNodeSetParams)                                          \
	X(cuGraphExecKernelNodeSetParams)                                                          \
	X(cuGraphExecKernelNodeSetParams_v2)                                                       \
	X(cuGraphExecMemcpyNodeSetParams)                                                          \
	X(cuGraphExecMemsetNodeSetParams)                                                          \
	X(cuGraphExecNodeSetParams)                                                                \
	X(cuGraphExecUpdate)                                                                       \
	X(cuGraphExecUpdate_v2)                                                                    \
	X(cuGraphInstantiate)                                                                      \
	X(cuGraphInstantiateWithFlags)                                                             \
	X(cuGraphInstantiateWithParams)                                                            \
	X(cuGraphInstantiateWithParams_ptsz)                                                       \
	X(cuGraphInstantiate_v2)                                                                   \
	X(cuGraphLaunch)                                                                           \
	X(cuGraphLaunch_ptsz)                                                                      \
	X(cuIpcCloseMemHandle)                                                                     \
	X(cuIpcGetMemHandle)                                                                       \
	X(cuIpcOpenMemHandle)                                                                      \
	X(cuIpcOpenMemHandle_v2)                                                                   \
	X(cuLibraryUnload)                                                                         \
	X(cuMemExportToShareableHandle)                                                            \
	X(cuMemGetHandleForAddressRange)                                                           \
	X(cuMemImportFromShareableHandle)                                                          \
	X(cuMemMap)                                                                                \
	X(cuMemPoolExportPointer)                                                                  \
	X(cuMemPoolImportPointer)                                                                  \
	X(cuMemRelease)                                                                            \
	X(cuMemRetainAllocationHandle)                                                             \
	X(cuMemUnmap)                                                                              \
	X(cuModuleUnload)                                                                          \
	X(cuMulticastBindAddr)                                                                     \
	X(cuMulticastBindAddr_v2)                                                                  \
	X(cuMulticastBindMem)                                                                      \
	X(cuMulticastBindMem_v2)

/* Counted only, unless something is watched. */
#define QS_SUBMISSION_COUNTED(X)                                                                   \
	QS_SUBMISSION_LAUNCHES(X)                                                                  \
	QS_SUBMISSION_COPIES(X)                                                                    \
	QS_SUBMISSION_FILLS(X)                                                                     \
	QS_SUBMISSION_STREAM(X)                                                                    \
	QS_SUBMISSION_MEMORY(X)

#define QS_SUBMISSIONS(X)                                                                          \
	QS_SUBMISSION_COUNTED(X)                                                                   \
	QS_SUBMISSION_KEPT(X)

#endif
