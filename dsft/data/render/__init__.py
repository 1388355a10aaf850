"""From what a row means to its tokens and their mask: takes samples, a tokenizer and a chat template.

May touch: the file of a chat template.
"""
