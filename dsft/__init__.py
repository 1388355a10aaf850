"""dsft: one experiment spec, from DeepSpeed configuration to trained and exported model."""

__version__ = "0.1.0"
