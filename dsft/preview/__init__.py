"""`dsft preview`: show the rows of a spec as the model will see them, and how a run would use them.

Needs only the data and the tokenizer, neither weights nor torch.
"""
