"""Steps: which examples a step has, which of them a rank computes, and their tensors.

A step is a pure function of its number.
"""
