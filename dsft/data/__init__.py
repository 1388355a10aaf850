"""Takes the spec's sources and a tokenizer. Gives micro-batches, with the counts of their whole step.

May touch: the data files, a chat template, a tokenizer's folder (or the hub, through transformers).
"""
