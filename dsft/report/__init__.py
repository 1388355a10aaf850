"""What a run tells and leaves: takes records of numbers and lines of text on rank 0, writes them to the
terminal, to the run's folder and to Weights & Biases. Nothing here changes what is trained."""
