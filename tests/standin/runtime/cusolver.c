/* What of cuSOLVER must give an answer. */
int cusolverDnCreate(void **handle) { return *handle = (void *)64, 0; }
