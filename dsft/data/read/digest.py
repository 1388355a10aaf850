"""Compute the digest of a data file, and cache that of its content in a folder across runs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from dsft.data.read import builtin
from dsft.data.read.files import DataFile, readable
from dsft.data.read.lines import BLOCK_BYTES
from dsft.spec.sources import BUILTIN_PREFIX
from dsft.system.digest import content_digest


def file_digest(file: DataFile, folder: Path | None = None) -> str:
    """Return a sha256 of a file's content, kind and block size: files with equal digests have equal blocks.

    The content's digest is cached in `folder`, so that an unchanged file is not read again. Raises
    MissingInputError if the file cannot be read, DataError if it changes while it is read.
    """
    read_as = json.dumps([file.kind, file.is_compressed, BLOCK_BYTES])
    if file.kind == "builtin":
        rows = builtin.builtin_rows(file.name.removeprefix(BUILTIN_PREFIX))
        content = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    else:
        with readable(file):
            content = content_digest(Path(file.path), folder)
    return hashlib.sha256(f"{read_as} {content}".encode()).hexdigest()
