"""Which examples a step holds, which of them a rank computes, and their tensors.

Takes a dataset. Touches nothing: a step is a pure function of its number.
"""
