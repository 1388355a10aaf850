"""DeepSpeed's engines behind one protocol (`api.Engine`). The only package that imports deepspeed or
torch.distributed."""

import logging

# On a CPU DeepSpeed warns that it takes the CPU; `device.take_device` says so where a GPU was expected.
logging.getLogger("DeepSpeed").addFilter(
    lambda record: "Setting accelerator to CPU" not in record.getMessage()
)
