/* CUDA's driver as far as torch asks it: devices, and the memory of its expandable segments, where a range of
   addresses is reserved and pieces of memory are put into it one by one. With STANDIN_SEGMENTS_REFUSED this
   fails as some drivers of WSL2 do. */
#define _GNU_SOURCE
#include "standin.h"
#include <stdlib.h>
#include <sys/mman.h>

#define GRANULARITY (2u << 20)
#define OUT_OF_MEMORY 2
#define UNKNOWN 999
typedef unsigned long long Pointer;

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { return *version = standin_driver(), 0; }
int cuDeviceGetCount(int *n) { return *n = standin_devices(), 0; }
int cuDeviceGet(int *device, int number) { return *device = number, 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { return *value = 1, 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)64, 0; }
int cuCtxGetCurrent(void **context) { return *context = (void *)64, 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxFromGreenCtx(void **context, void *green) { return 801; }
int cuGetErrorString(int error, const char **text) { return *text = "an error of the stand-in GPU's driver", 0; }
int cuGetErrorName(int error, const char **text) { return *text = "CUDA_ERROR", 0; }
int cuPointerGetAttribute(void *value, int attribute, Pointer p) { return *(Pointer *)value = p, 0; }
int cuPointerGetAttributes(unsigned n, int *attributes, void **values, Pointer p) { return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int block, size_t shared) { return *n = 2, 0; }
int cuLaunchKernel() { return counted(LAUNCHES), 0; }
int cuLaunchCooperativeKernel() { return counted(LAUNCHES), 0; }

int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int which) {
    return *bytes = GRANULARITY, 0;
}
int cuMemAddressReserve(Pointer *p, size_t bytes, size_t alignment, Pointer at, unsigned long long flags) {
    void *address;
    if (!standin_map(&address, bytes)) return OUT_OF_MEMORY;
    return *p = (Pointer)address, 0;
}
int cuMemAddressFree(Pointer p, size_t bytes) { return standin_unmap((void *)p, bytes), 0; }
typedef struct {
    int device;
    size_t bytes;
} Piece;
int cuMemCreate(Piece **piece, size_t bytes, const void *properties, unsigned long long flags) {
    int device = standin_current();
    if (!standin_take(device, (long)bytes)) return OUT_OF_MEMORY;
    *piece = malloc(sizeof **piece);
    **piece = (Piece){device, bytes};
    return 0;
}
int cuMemRelease(Piece *piece) {
    standin_take(piece->device, -(long)piece->bytes);
    free(piece);
    return 0;
}
int cuMemMap(Pointer p, size_t bytes, size_t at, Piece *piece, unsigned long long flags) {
    return standin_know((void *)p, bytes), 0;
}
int cuMemSetAccess(Pointer p, size_t bytes, const void *access, size_t n) {
    return getenv("STANDIN_SEGMENTS_REFUSED") ? UNKNOWN : 0;
}
int cuMemUnmap(Pointer p, size_t bytes) {
    standin_forget((void *)p);
    madvise((void *)p, bytes, MADV_DONTNEED);
    return 0;
}
