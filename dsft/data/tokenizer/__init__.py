"""Tokenizers, read or trained: takes a name, a folder, or texts.

May touch: tokenizers' folders, the hub through transformers, the data files that one is trained on.
"""
