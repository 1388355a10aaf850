/* What of cuSPARSE must give an answer. */
int cusparseCreate(void **handle) { return *handle = (void *)64, 0; }
