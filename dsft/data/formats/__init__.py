"""What a row means: its format, found from its keys, and the text, conversation or pair that it holds.

Takes the rows of a file as JSON-like mappings. Gives Rows. Touches nothing.
"""

from __future__ import annotations

from dsft.data.formats.content import content_hash
from dsft.data.formats.convert import convert
from dsft.data.formats.detect import Format, Source, choose

__all__ = ["Format", "Source", "choose", "content_hash", "convert"]
