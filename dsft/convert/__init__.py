"""Convert the config of another tool (LLaMA-Factory, Axolotl, TRL or transformers, ms-swift, DeepSpeed) into
a spec: `dsft convert`."""
