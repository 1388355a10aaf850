/* What of cuDNN must give an answer. CUDNN is the version that this build of torch was made for. */
#include <stddef.h>
size_t cudnnGetVersion(void) { return CUDNN; }
int cudnnGetProperty(int part, int *value) { /* 0, 1, 2: major, minor, patch */
    int parts[] = {CUDNN / 10000, CUDNN / 100 % 100, CUDNN % 100};
    return *value = parts[part], 0;
}
size_t cudnnGetCudartVersion(void) { return CUDA; }
int cudnnBackendCreateDescriptor(int kind, void **made) { return *made = 0, 3000; } /* not supported: no plans */
int cudnnCreate(void **handle) { return *handle = (void *)64, 0; }
const char *cudnnGetErrorString(int error) { return "an error of the stand-in cuDNN"; }
void cudnnGetLastErrorString(char *text, size_t room) { *text = 0; }
