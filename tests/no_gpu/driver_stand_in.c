/* A stand-in for libcuda.so.1 on a machine without a GPU, for tests alone.
 *
 * cuDNN's runtime-compiled engines load what they have compiled to read its properties, and so ask for the CUDA
 * driver. Loading and unloading answer with success here and every query with a plausible value, so that
 * planning, compilation and serialization run for real. Whatever needs a device answers CUDA_ERROR_NO_DEVICE:
 * nothing can be launched on it. */

#include <stdint.h>

enum { SUCCESS = 0, NO_DEVICE = 100 };

#define SUCCEEDS(name) int name(void) { return SUCCESS; }
#define NEEDS_A_DEVICE(name) int name(void) { return NO_DEVICE; }
#define GIVES_A_HANDLE(name) \
    int name(void **handle) { return *handle = (void *)(uintptr_t)0x10000, SUCCESS; }
#define GIVES_A_NUMBER(name, number) \
    int name(int *value) { return *value = (number), SUCCESS; }
#define GIVES_A_TEXT(name, text) \
    int name(int error, const char **value) { return (void)error, *value = (text), SUCCESS; }

GIVES_A_HANDLE(cuLibraryLoadData)
GIVES_A_HANDLE(cuLibraryLoadFromFile)
GIVES_A_HANDLE(cuLibraryGetKernel)
GIVES_A_HANDLE(cuKernelGetFunction)
GIVES_A_HANDLE(cuModuleLoadData)
GIVES_A_HANDLE(cuModuleLoadDataEx)
GIVES_A_HANDLE(cuModuleGetFunction)
SUCCEEDS(cuLibraryUnload)
SUCCEEDS(cuModuleUnload)
SUCCEEDS(cuKernelSetAttribute)
SUCCEEDS(cuFuncSetAttribute)
GIVES_A_NUMBER(cuKernelGetAttribute, 0)
GIVES_A_NUMBER(cuFuncGetAttribute, 0)
GIVES_A_NUMBER(cuOccupancyMaxPotentialClusterSize, 8)
GIVES_A_NUMBER(cuOccupancyMaxActiveBlocksPerMultiprocessor, 1)
GIVES_A_TEXT(cuGetErrorString, "this is a stand-in for the CUDA driver")
GIVES_A_TEXT(cuGetErrorName, "STAND_IN")

NEEDS_A_DEVICE(cuInit)
NEEDS_A_DEVICE(cuDriverGetVersion)
NEEDS_A_DEVICE(cuDeviceGet)
NEEDS_A_DEVICE(cuDeviceGetCount)
NEEDS_A_DEVICE(cuDeviceGetAttribute)
NEEDS_A_DEVICE(cuCtxGetCurrent)
NEEDS_A_DEVICE(cuCtxGetLimit)
NEEDS_A_DEVICE(cuCtxPushCurrent)
NEEDS_A_DEVICE(cuCtxPopCurrent)
NEEDS_A_DEVICE(cuStreamGetCtx)
NEEDS_A_DEVICE(cuStreamIsCapturing)
NEEDS_A_DEVICE(cuLinkCreate)
NEEDS_A_DEVICE(cuLinkAddData)
NEEDS_A_DEVICE(cuLinkComplete)
NEEDS_A_DEVICE(cuLinkDestroy)
NEEDS_A_DEVICE(cuLaunchKernel)
NEEDS_A_DEVICE(cuLaunchKernelEx)
NEEDS_A_DEVICE(cuLaunchCooperativeKernel)
NEEDS_A_DEVICE(cuTensorMapEncodeIm2col)
NEEDS_A_DEVICE(cuTensorMapEncodeTiled)
NEEDS_A_DEVICE(cuGetProcAddress)
NEEDS_A_DEVICE(cuGetProcAddress_v2)
