"""The frozen reference of preference objectives: its log-probabilities, wherever they come from.

Takes a spec, its inputs and a world. Gives what fills `MicroBatch.pairs.reference`.
"""
