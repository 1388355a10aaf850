"""Tokenizers: load them from a folder or the hub, or train one on texts."""
