"""Row formats: detect a file's format from its keys, and convert its rows to texts, conversations and
pairs."""

from __future__ import annotations

from dsft.data.formats.convert import HEAD_ROWS, content_hash, convert
from dsft.data.formats.detect import Format, choose

__all__ = ["HEAD_ROWS", "Format", "choose", "content_hash", "convert"]
