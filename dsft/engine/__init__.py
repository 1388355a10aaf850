"""DeepSpeed's engines behind one protocol (`api.Engine`)."""

import dsft.dist  # noqa: F401  # its filter of DeepSpeed's warnings
