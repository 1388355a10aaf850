"""`dsft prove`: a small run in a spec's own mode beside a plain PyTorch loop, compared."""
