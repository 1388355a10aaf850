"""Render rows: from texts and conversations to token ids and their mask, by a tokenizer and a chat
template."""
