"""DeepSpeed's engines behind one protocol: takes a module, an objective and micro-batches, gives sums,
norms and owned state. The only package that imports deepspeed or torch.distributed."""
