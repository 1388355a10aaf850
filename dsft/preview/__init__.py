"""Rows as the model will see them, and what a run would make of them: takes a spec, needs its data and its
tokenizer alone, neither weights nor torch."""
