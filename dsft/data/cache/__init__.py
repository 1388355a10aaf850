"""The tokens of a source's rows, made once and kept: takes a source and a renderer, gives TokenRows.

May touch: the data files, and the folder of the cache.
"""
