/* What of cuBLAS must give an answer. */
int cublasCreate_v2(void **handle) { return *handle = (void *)64, 0; }
int cublasGetMathMode(void *handle, int *mode) { return *mode = 0, 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0, 0; }
