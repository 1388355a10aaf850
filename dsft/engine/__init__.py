"""DeepSpeed's engines behind one protocol (`api.Engine`). The only package that imports deepspeed or
torch.distributed."""
