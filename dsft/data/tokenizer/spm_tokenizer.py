"""A transformers tokenizer that encodes and decodes with sentencepiece.

It is saved as a converted tokenizer, which transformers loads without this class.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from transformers import SentencePieceBackend

from dsft.data.tokenizer.spm import save_converted


class SentencePieceTokenizer(SentencePieceBackend):
    """A tokenizer whose ids and texts are sentencepiece's, between special tokens that are spelled out in the
    text. model_digest: an entry of `init_kwargs`, which identify a tokenizer."""

    def __init__(self, vocab_file: str, **special_tokens: Any) -> None:
        digest = hashlib.sha256(Path(vocab_file).read_bytes()).hexdigest()
        given = {"special_tokens_pattern": "none", "model_digest": digest} | special_tokens
        super().__init__(vocab_file=vocab_file, **given)  # type: ignore[no-untyped-call]

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [self.sp_model.id_to_piece(index) for index in self.sp_model.encode(text)]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        text: str = self.sp_model.decode_pieces(tokens)
        return text

    def save_pretrained(self, save_directory: Any, *_: Any, **__: Any) -> tuple[str, ...]:
        """Save the converted tokenizer and the model file to a folder."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        save_converted(Path(str(self.vocab_file)), self, folder)
        return tuple(str(path) for path in folder.iterdir())
