"""Makes the tokens of a file in small blocks and prints what happens, for tests that start several of it.

python builder.py FILE FOLDER WORKERS SECONDS [BLOCKS]

It sleeps for SECONDS after each block that is made; once BLOCKS are made it waits to be killed.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

from dsft.data.cache import store
from dsft.data.cache.store import Cache, StoredRows, TokenizeProgress, tokenized_rows
from dsft.data.read import files
from dsft.data.render.renderer import Renderer
from dsft.data.tokenizer.load import byte_level_tokenizer
from dsft.spec.schema import Source

BLOCK_BYTES = 1000


def small_blocks() -> None:
    """Blocks of a kilobyte, worth a worker."""
    files.block_starts = partial(files.block_starts, every=BLOCK_BYTES)
    store._SMALL = 0


def made(path: Path, cache: Cache) -> StoredRows:
    return tokenized_rows(
        Source(path=str(path)), Renderer(byte_level_tokenizer()), task="pretrain", cache=cache
    )


def main(path: str, folder: str, workers: str, seconds: str, blocks: str = "0") -> None:
    small_blocks()
    done = 0

    def progress(pace: TokenizeProgress) -> None:
        nonlocal done
        if pace.done > done:
            done = pace.done
            print("made", done, flush=True)
            time.sleep(float(seconds))
            while 0 < int(blocks) <= done:
                time.sleep(1)

    rows = made(Path(path), Cache(Path(folder), int(workers), print, progress))
    print("digest", rows.digest, done, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
