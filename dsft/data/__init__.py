"""Read a spec's data sources, tokenize them and build micro-batches, with the counts of their whole step.

Reads the data files, a chat template and a tokenizer's folder (or the hub, through transformers).
"""
