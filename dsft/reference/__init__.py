"""Compute the log-probabilities of the frozen reference for preference objectives, and fill them into
`MicroBatch.answers.reference`."""
