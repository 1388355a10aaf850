"""Which rows, and which parts of them, are trained on and evaluated, and the account of all others.

Takes a spec and a tokenizer, gives datasets. Touches nothing by itself.
"""
