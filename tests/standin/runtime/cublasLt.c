/* What of cuBLASLt must give an answer. */
#include <stddef.h>
int cublasLtCreate(void **handle) { return *handle = (void *)64, 0; }
size_t cublasLtGetVersion(void) { return 130000; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *found) {
    return *found = 1, 0;
}
