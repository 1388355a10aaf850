/* NVIDIA's management library as far as torch asks it: the devices' number and handles, nothing of their links. */
#include "standin.h"
#include <stdlib.h>

#define NOT_SUPPORTED 3
#define NO_DRIVER 9

int nvmlInit(void) { return standin_driver() > 0 ? 0 : NO_DRIVER; }
int nvmlInit_v2(void) { return nvmlInit(); }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(int *n) { /* CUDA_VISIBLE_DEVICES does not count here */
    const char *said = getenv("STANDIN_DEVICES");
    return *n = said ? atoi(said) : 1, 0;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { return *device = (void *)64, 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = standin_driver(), 0; }
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *n, void *processes) { return *n = 0, 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *pci) { return NOT_SUPPORTED; }
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return 0; } /* as it came: no fabric */
