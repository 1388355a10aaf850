/* What the libraries of the stand-in share: counters of what torch asked of the device. */
#pragma once
#include <stddef.h>

enum {
    LAUNCHES,     /* kernels */
    PRODUCTS,     /* matrix products and other calls of cuBLAS and cuDNN that would launch kernels */
    FILLS,        /* memset on the device */
    TO_DEVICE,    /* copies from the host */
    TO_HOST,      /* copies to the host */
    ON_DEVICE,    /* copies on the device, and between devices */
    PAGEABLE,     /* of TO_DEVICE and TO_HOST: from or to host memory that is not pinned */
    STREAM_SYNCS, /* cudaStreamSynchronize, and copies that block */
    DEVICE_SYNCS, /* cudaDeviceSynchronize */
    EVENT_SYNCS,  /* cudaEventSynchronize */
    COLLECTIVES,  /* NCCL */
    KINDS
};
extern long standin_counts[KINDS];

static inline void counted(int kind) { __atomic_add_fetch(&standin_counts[kind], 1, __ATOMIC_RELAXED); }

/* Device memory: addresses of the host's, reserved but taken only where they are written. */
int standin_map(void **address, size_t bytes);
void standin_unmap(void *address, size_t bytes);
/* Takes bytes of a device's memory; 0 where it has no room for them. A negative number gives them back. */
int standin_take(int device, long bytes);
/* Makes a range of addresses known as device memory, and forgets it. */
void standin_know(void *address, size_t bytes);
void standin_forget(void *address);
int standin_current(void);
size_t standin_total(void);
int standin_devices(void);
int standin_driver(void);
