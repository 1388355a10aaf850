"""The command `dsft data build`: tokenize the data of a spec into its cache folder, ahead of its runs.

Needs neither a GPU nor torch.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dsft.data.cache.store import Cache, CacheSummary, cache_folder
from dsft.data.render.template import choose_template
from dsft.data.sets.load import load_data
from dsft.data.tokenizer.load import open_tokenizer
from dsft.report.console import task_progress
from dsft.spec.load import load_spec

log = partial(print, flush=True)


def build(spec_path: Path, overrides: Sequence[str]) -> None:
    """Tokenize the spec's data and print what the cache then has. Raises what a run would raise for the same
    data."""
    began = time.monotonic()
    spec = load_spec(spec_path, overrides)
    tokenizer, _ = open_tokenizer(spec.model)
    choose_template(tokenizer, spec.data.chat_template, spec.data.thinking)
    folder, sizes = cache_folder(spec), list[int]()

    def report(summary: CacheSummary) -> None:
        sizes.append(summary.num_bytes)
        log(str(summary))

    try:
        with task_progress(log) as progress:
            cache = Cache(folder, spec.data.num_workers, log, progress, report)
            lines = load_data(spec, tokenizer, cache).lines
    except KeyboardInterrupt:
        log(f"stopped; finished tokens stay in {folder}, and the same command continues from there")
        raise
    for line in lines:
        log(line)
    seconds = time.monotonic() - began
    log(f"{folder} has {sum(sizes) / 1e6:,.1f} MB of tokens for this spec; this took {seconds:.1f} s")
    log(f"next: dsft launch {shlex.join([str(spec_path), *overrides])}")
