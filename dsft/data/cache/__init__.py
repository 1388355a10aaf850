"""The token cache: tokenize the rows of a source once and read them from the disk in later runs.

Reads the data files; reads and writes the cache folder.
"""
