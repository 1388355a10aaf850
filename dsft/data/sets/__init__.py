"""Datasets: which rows, and which parts of them, are trained on and evaluated, and what became of the
others."""
