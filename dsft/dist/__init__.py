"""The process group, what ranks agree on through it, and the exchange of a sequence's parts between ranks.
Only this package and `engine` import torch.distributed and deepspeed; this one uses deepspeed's accelerator."""

import logging

# On a CPU DeepSpeed warns that it takes the CPU; `device.take_device` says so where a GPU was expected.
logging.getLogger("DeepSpeed").addFilter(
    lambda record: "Setting accelerator to CPU" not in record.getMessage()
)
