/* CUDA's runtime without a device. Memory of the device is memory of the host, of which only what is written is
   taken; kernels do nothing, everything else is done at once, in the order of the calls. What a kernel would have
   written keeps its bytes: zeros in memory that is new.

   STANDIN_DEVICES  devices (1)               STANDIN_GIB         memory of each, in GiB (139.8)
   STANDIN_NAME     their name (NVIDIA H200)  STANDIN_CAPABILITY  compute capability (9.0)
   STANDIN_DRIVER   CUDA version of the driver, as 12080 (the runtime's own); 0: there is no driver
   STANDIN_MODE     fast: copies of a MiB or more that touch the device are not made either, so that no model is
                    too large; numbers: all copies are made
   STANDIN_COUNTS   1: the counters are printed to stderr when the process ends
   STANDIN_KERNELS  a file to which the name of every launched kernel is added, a line each */
#define _GNU_SOURCE
#include "standin.h"
#include <dlfcn.h>
#include <driver_types.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <vector_types.h>

#define MAX_DEVICES 64
#define OK cudaSuccess
typedef cudaError_t E;

long standin_counts[KINDS];
static __thread int current;
static __thread E last;
static E failed(E error) { return last = error; }

static double setting(const char *name, double otherwise) {
    const char *said = getenv(name);
    return said && *said ? atof(said) : otherwise;
}
static int fast(void) {
    static int is = -1;
    if (is < 0) {
        const char *mode = getenv("STANDIN_MODE");
        is = !mode || strcmp(mode, "numbers") != 0;
    }
    return is;
}
size_t standin_total(void) { return (size_t)(setting("STANDIN_GIB", 139.8) * (1ull << 30)); }
int standin_driver(void) { return (int)setting("STANDIN_DRIVER", CUDA); }
/* Those that CUDA_VISIBLE_DEVICES lets through: a list of numbers ends at the first that names no device. */
int standin_devices(void) {
    int all = (int)setting("STANDIN_DEVICES", 1), seen = 0;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) return all;
    while (*visible) {
        char *end;
        long number = strtol(visible, &end, 10);
        if (end == visible ? strncmp(visible, "GPU-", 4) != 0 : (number < 0 || number >= all)) break;
        seen++;
        end = strchr(visible, ',');
        if (!end) break;
        visible = end + 1;
    }
    return seen;
}

__attribute__((destructor)) static void report(void) {
    static const char *names[KINDS] = {"launches",  "products",     "fills",        "to_device",   "to_host",    "on_device",
                                       "pageable",  "stream_syncs", "device_syncs", "event_syncs", "collectives"};
    if (!setting("STANDIN_COUNTS", 0)) return;
    fprintf(stderr, "stand-in GPU:");
    for (int i = 0; i < KINDS; i++) fprintf(stderr, " %s %ld", names[i], standin_counts[i]);
    fputc('\n', stderr);
}

/* ---- memory ------------------------------------------------------------------------------------------------- */

typedef struct {
    char *start;
    size_t bytes;
    enum cudaMemoryType type;
    int device;
} Region;
static Region *regions;
static int n_regions, room;
static size_t used[MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

int standin_take(int device, long bytes) {
    pthread_mutex_lock(&lock);
    int fits = bytes <= 0 || used[device] + bytes <= standin_total();
    if (fits) used[device] += bytes;
    pthread_mutex_unlock(&lock);
    return fits;
}
static void know(void *start, size_t bytes, enum cudaMemoryType type) {
    pthread_mutex_lock(&lock);
    if (n_regions == room) regions = realloc(regions, (room = room ? 2 * room : 256) * sizeof *regions);
    regions[n_regions++] = (Region){start, bytes, type, current};
    pthread_mutex_unlock(&lock);
}
static Region forget(void *start) {
    Region found = {0};
    pthread_mutex_lock(&lock);
    for (int i = n_regions - 1; i >= 0; i--)
        if (regions[i].start == start) {
            found = regions[i];
            regions[i] = regions[--n_regions];
            break;
        }
    pthread_mutex_unlock(&lock);
    return found;
}
void standin_know(void *start, size_t bytes) { know(start, bytes, cudaMemoryTypeDevice); }
void standin_forget(void *start) { forget(start); }
int standin_current(void) { return current; }
static Region region(const void *address) {
    Region found = {0};
    pthread_mutex_lock(&lock);
    for (int i = n_regions - 1; i >= 0; i--)
        if ((char *)address >= regions[i].start && (char *)address < regions[i].start + regions[i].bytes) {
            found = regions[i];
            break;
        }
    pthread_mutex_unlock(&lock);
    return found;
}
int standin_map(void **address, size_t bytes) {
    *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return *address != MAP_FAILED;
}
void standin_unmap(void *address, size_t bytes) { munmap(address, bytes); }

static E allocated(void **address, size_t bytes, enum cudaMemoryType type) {
    int on_device = type == cudaMemoryTypeDevice;
    *address = NULL;
    if (!bytes) return OK;
    if (on_device && !standin_take(current, (long)bytes)) return failed(cudaErrorMemoryAllocation);
    if (!standin_map(address, bytes)) return failed(cudaErrorMemoryAllocation);
    know(*address, bytes, type);
    return OK;
}
static E freed(void *address) {
    if (!address) return OK;
    Region was = forget(address);
    if (was.type == cudaMemoryTypeDevice) standin_take(was.device, -(long)was.bytes);
    standin_unmap(address, was.bytes);
    return OK;
}
E cudaMalloc(void **p, size_t n) { return allocated(p, n, cudaMemoryTypeDevice); }
E cudaMallocAsync(void **p, size_t n, cudaStream_t s) { return cudaMalloc(p, n); }
E cudaFree(void *p) { return freed(p); }
E cudaFreeAsync(void *p, cudaStream_t s) { return freed(p); }
E cudaHostAlloc(void **p, size_t n, unsigned flags) { return allocated(p, n, cudaMemoryTypeHost); }
E cudaFreeHost(void *p) { return freed(p); }
E cudaHostRegister(void *p, size_t n, unsigned flags) { return know(p, n, cudaMemoryTypeHost), OK; }
E cudaHostUnregister(void *p) { return forget(p), OK; }
E cudaMemGetInfo(size_t *left, size_t *total) {
    *total = standin_total();
    *left = *total - used[current];
    return OK;
}
E cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    Region found = region(p);
    memset(a, 0, sizeof *a);
    a->type = found.type;
    a->device = found.device;
    a->devicePointer = found.type ? (void *)p : NULL;
    a->hostPointer = found.type == cudaMemoryTypeHost ? (void *)p : NULL;
    return OK;
}

static void copied(void *to, const void *from, size_t bytes) {
    enum cudaMemoryType a = region(from).type, b = region(to).type;
    int reads = a == cudaMemoryTypeDevice, writes = b == cudaMemoryTypeDevice;
    counted(reads ? (writes ? ON_DEVICE : TO_HOST) : TO_DEVICE);
    if ((!reads && a != cudaMemoryTypeHost) || (!writes && b != cudaMemoryTypeHost)) counted(PAGEABLE);
    if (!fast() || bytes < 1 << 20) memmove(to, from, bytes);
}
E cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind k) {
    copied(to, from, n);
    counted(STREAM_SYNCS);
    return OK;
}
E cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind k, cudaStream_t s) {
    return copied(to, from, n), OK;
}
E cudaMemcpyPeerAsync(void *to, int b, const void *from, int a, size_t n, cudaStream_t s) {
    return copied(to, from, n), OK;
}
E cudaMemcpy2DAsync(void *to, size_t there, const void *from, size_t here, size_t width, size_t height,
                    enum cudaMemcpyKind k, cudaStream_t s) {
    for (size_t i = 0; i < height; i++) memmove((char *)to + i * there, (const char *)from + i * here, width);
    counted(ON_DEVICE);
    return OK;
}
static E filled(void *p, int value, size_t n) {
    counted(FILLS);
    if (!fast() || n < 1 << 20) memset(p, value, n);
    return OK;
}
E cudaMemset(void *p, int value, size_t n) { return filled(p, value, n); }
E cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t s) { return filled(p, value, n); }
E cudaMemcpyToSymbol(const void *symbol, const void *from, size_t n, size_t at, enum cudaMemcpyKind k) { return OK; }
E cudaGetSymbolAddress(void **p, const void *symbol) {
    static char symbols[1 << 16];
    *p = symbols;
    return OK;
}

/* ---- devices ------------------------------------------------------------------------------------------------ */

static int capability(int part) {
    const char *said = getenv("STANDIN_CAPABILITY");
    int major = 9, minor = 0;
    if (said) sscanf(said, "%d.%d", &major, &minor);
    return part ? minor : major;
}
E cudaGetDeviceCount(int *n) {
    *n = 0;
    if (standin_driver() < CUDA / 1000 * 1000) return failed(cudaErrorInsufficientDriver);
    *n = standin_devices();
    return *n ? OK : failed(cudaErrorNoDevice);
}
E cudaGetDevice(int *d) { return *d = current, OK; }
E cudaSetDevice(int d) {
    if (d < 0 || d >= standin_devices()) return failed(cudaErrorInvalidDevice);
    current = d;
    return OK;
}
E cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    if (d < 0 || d >= standin_devices()) return failed(cudaErrorInvalidDevice);
    const char *name = getenv("STANDIN_NAME");
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", name ? name : "NVIDIA H200");
    p->major = capability(0);
    p->minor = capability(1);
    p->totalGlobalMem = standin_total();
    p->multiProcessorCount = 132;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->sharedMemPerBlock = 48 << 10;
    p->sharedMemPerBlockOptin = 227 << 10;
    p->sharedMemPerMultiprocessor = 228 << 10;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->l2CacheSize = 60 << 20;
    p->memoryBusWidth = 6144;
    p->unifiedAddressing = p->concurrentKernels = p->canMapHostMemory = 1;
    p->pciBusID = d + 1;
    p->uuid.bytes[0] = (char)(d + 1);
    return OK;
}
E cudaGetDeviceProperties_v2(struct cudaDeviceProp *p, int d) { return cudaGetDeviceProperties(p, d); }
E cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
    struct cudaDeviceProp p;
    E error = cudaGetDeviceProperties(&p, d);
    if (error) return error;
    switch (a) {
    case cudaDevAttrComputeCapabilityMajor: *v = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *v = p.minor; break;
    case cudaDevAttrMultiProcessorCount: *v = p.multiProcessorCount; break;
    case cudaDevAttrWarpSize: *v = p.warpSize; break;
    case cudaDevAttrMaxThreadsPerBlock: *v = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *v = p.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrMaxGridDimX: *v = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *v = p.maxGridSize[1]; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = (int)p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = (int)p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = (int)p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrL2CacheSize: *v = p.l2CacheSize; break;
    default: *v = 1;
    }
    return OK;
}
E cudaDeviceGetPCIBusId(char *id, int n, int d) { return snprintf(id, n, "0000:%02x:00.0", d + 1), OK; }
E cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, OK; }
E cudaDeviceCanAccessPeer(int *can, int a, int b) { return *can = a != b, OK; }
E cudaDeviceEnablePeerAccess(int d, unsigned flags) { return OK; }
E cudaDeviceSynchronize(void) { return counted(DEVICE_SYNCS), OK; }
E cudaDriverGetVersion(int *v) { return *v = standin_driver(), OK; }
E cudaRuntimeGetVersion(int *v) { return *v = CUDA, OK; }
/* The driver's functions come from the stand-in's libcuda; one that it lacks refuses. */
static E unsupported(void) { return cudaErrorNotSupported; }
static E entry(const char *name, void **function, enum cudaDriverEntryPointQueryResult *found) {
    static void *driver;
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW);
    *function = dlsym(driver, name);
    if (!*function) *function = (void *)unsupported;
    if (found) *found = cudaDriverEntryPointSuccess;
    return OK;
}
E cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                   enum cudaDriverEntryPointQueryResult *found) {
    return entry(name, function, found);
}
E cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                          enum cudaDriverEntryPointQueryResult *found) {
    return entry(name, function, found);
}

/* ---- streams and events ------------------------------------------------------------------------------------- */

struct CUstream_st { int priority; };
struct CUevent_st { struct timespec at; };

E cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) {
    *s = malloc(sizeof **s);
    (*s)->priority = priority;
    return OK;
}
E cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
E cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }
E cudaStreamDestroy(cudaStream_t s) { return free(s), OK; }
E cudaStreamGetPriority(cudaStream_t s, int *priority) {
    *priority = (uintptr_t)s > 2 ? s->priority : 0; /* 0 to 2 are the streams that are always there */
    return OK;
}
E cudaStreamQuery(cudaStream_t s) { return OK; }
E cudaStreamSynchronize(cudaStream_t s) { return counted(STREAM_SYNCS), OK; }
E cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) { return OK; }
E cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *is) { return *is = 0, OK; }
/* Versions of this function differ after their third argument, which is not read of a stream that captures nothing. */
E cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *is, unsigned long long *id) {
    *is = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    return OK;
}
E cudaStreamGetCaptureInfo_v2(cudaStream_t s, enum cudaStreamCaptureStatus *is, unsigned long long *id) {
    return cudaStreamGetCaptureInfo(s, is, id);
}
E cudaStreamGetCaptureInfo_v3(cudaStream_t s, enum cudaStreamCaptureStatus *is, unsigned long long *id) {
    return cudaStreamGetCaptureInfo(s, is, id);
}
E cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return OK; }
E cudaStreamAddCallback(cudaStream_t s, void (*then)(cudaStream_t, E, void *), void *data, unsigned flags) {
    return then(s, OK, data), OK;
}
E cudaLaunchHostFunc(cudaStream_t s, void (*then)(void *), void *data) { return then(data), OK; }

E cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) { return *e = calloc(1, sizeof **e), OK; }
E cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
E cudaEventDestroy(cudaEvent_t e) { return free(e), OK; }
E cudaEventQuery(cudaEvent_t e) { return OK; }
E cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return clock_gettime(CLOCK_MONOTONIC, &e->at), OK; }
E cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) { return cudaEventRecord(e, s); }
E cudaEventSynchronize(cudaEvent_t e) { return counted(EVENT_SYNCS), OK; }
E cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { /* of the host: nothing runs elsewhere */
    *ms = (float)(1e3 * (double)(b->at.tv_sec - a->at.tv_sec) + 1e-6 * (double)(b->at.tv_nsec - a->at.tv_nsec));
    return OK;
}
E cudaEventElapsedTime_v2(float *ms, cudaEvent_t a, cudaEvent_t b) { return cudaEventElapsedTime(ms, a, b); }

/* ---- kernels ------------------------------------------------------------------------------------------------ */

typedef struct {
    const void *function;
    const char *name;
} Kernel;
static Kernel *kernels;
static int n_kernels, kernel_room, sorted;
static FILE *names;

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterVar(void **handle, char *var, char *address, const char *name, int ext, size_t n, int c, int g) {}
char __cudaInitModule(void **handle) { return 1; }
void __cudaRegisterFunction(void **handle, const char *function, char *device, const char *name, int limit, void *tid,
                            void *bid, void *block, void *grid, int *warp) {
    if (!getenv("STANDIN_KERNELS")) return;
    if (n_kernels == kernel_room)
        kernels = realloc(kernels, (kernel_room = kernel_room ? 2 * kernel_room : 1 << 16) * sizeof *kernels);
    kernels[n_kernels++] = (Kernel){function, name};
    sorted = 0;
}
static int by_function(const void *a, const void *b) {
    const char *x = ((const Kernel *)a)->function, *y = ((const Kernel *)b)->function;
    return (x > y) - (x < y);
}
static E launched(const void *function) {
    counted(LAUNCHES);
    if (!n_kernels) return OK;
    pthread_mutex_lock(&lock);
    if (!sorted) qsort(kernels, n_kernels, sizeof *kernels, by_function), sorted = 1;
    if (!names) names = fopen(getenv("STANDIN_KERNELS"), "ae");
    Kernel key = {function, NULL}, *found = bsearch(&key, kernels, n_kernels, sizeof *kernels, by_function);
    if (names) fprintf(names, "%s\n", found ? found->name : "?"), fflush(names);
    pthread_mutex_unlock(&lock);
    return OK;
}
E cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) { return launched(f); }
E cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) { return launched(f); }
E cudaLaunchKernelExC(const void *config, const void *f, void **a) { return launched(f); }
E __cudaLaunchKernel(void *f, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) { return launched(f); }
E __cudaGetKernel(void **kernel, const void *function) { return *kernel = (void *)function, OK; }

static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} calls[16];
static __thread int depth;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    calls[depth].grid = grid;
    calls[depth].block = block;
    calls[depth].shared = shared;
    calls[depth++].stream = stream;
    return 0;
}
E __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = calls[--depth].grid;
    *block = calls[depth].block;
    *shared = calls[depth].shared;
    *(void **)stream = calls[depth].stream;
    return OK;
}
E cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 32;
    a->binaryVersion = a->ptxVersion = 10 * capability(0) + capability(1);
    return OK;
}
E cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v) { return OK; }
E cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int block, size_t shared) { return *n = 2, OK; }
E cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int block, size_t shared, unsigned u) {
    return *n = 2, OK;
}

/* ---- errors ------------------------------------------------------------------------------------------------- */

E cudaGetLastError(void) {
    E error = last;
    last = OK;
    return error;
}
E cudaPeekAtLastError(void) { return last; }
/* In CUDA's words where they are known: dsft and DeepSpeed read some of them. */
const char *cudaGetErrorString(E e) {
    switch (e) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNotSupported: return "operation not supported (the stand-in GPU has no such function)";
    default: return "an error of the stand-in GPU";
    }
}
const char *cudaGetErrorName(E e) {
    switch (e) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInsufficientDriver: return "cudaErrorInsufficientDriver";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    default: return "cudaErrorUnknown";
    }
}
E cudaProfilerStart(void) { return OK; }
E cudaProfilerStop(void) { return OK; }
E cudaIpcCloseMemHandle(void *p) { return OK; }
E cudaMemPoolTrimTo(void *pool, size_t n) { return OK; }
E cudaGraphDestroy(void *graph) { return OK; }
E cudaGraphExecDestroy(void *graph) { return OK; }
