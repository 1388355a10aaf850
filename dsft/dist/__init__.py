"""The process group, what ranks agree on through it, and the exchange of one sequence's parts. With `engine` the
only package that imports torch.distributed or deepspeed, of which it needs the accelerator."""

import logging

# On a CPU DeepSpeed warns that it takes the CPU; `device.take_device` says so where a GPU was expected.
logging.getLogger("DeepSpeed").addFilter(
    lambda record: "Setting accelerator to CPU" not in record.getMessage()
)
