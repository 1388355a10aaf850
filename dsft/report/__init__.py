"""Report a run from rank 0: write records of numbers and lines of text to the terminal, to the run's folder
and to Weights & Biases. Nothing here changes what is trained."""
