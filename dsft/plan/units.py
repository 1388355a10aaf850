"""Sizes that more than one module counts in. Takes and touches nothing."""

GIB = 2**30  # bytes
FP32 = 4  # bytes of an element
