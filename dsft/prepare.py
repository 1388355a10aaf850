"""The command `dsft data build`: makes the tokens of a spec's rows ahead of its runs.

Takes a spec's path. Needs neither a GPU nor torch. Writes the cache's folder, and prints what is in it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dsft.data.render import Renderer
from dsft.data.rows import data_error
from dsft.data.store import Cache, Kept, cache_folder, tokenised
from dsft.data.template import choose_template
from dsft.data.tokenizer import open_tokenizer
from dsft.errors import Problem
from dsft.plan.promised import load
from dsft.report.making import shown

say = partial(print, flush=True)


def build(spec_path: Path, overrides: Sequence[str]) -> None:
    """Raises what a run would raise at its start for the same data."""
    began = time.monotonic()
    spec = load(spec_path, overrides)
    tokenizer, _ = open_tokenizer(spec.model)
    choose_template(tokenizer, spec.data.chat_template)
    renderer = Renderer(tokenizer, train_on=spec.data.train_on)
    folder = cache_folder(spec)
    kept: list[Kept] = []
    bad: list[Problem] = []
    with shown(say) as progress:
        cache = Cache(folder, spec.data.num_workers, say, progress, kept.append)
        for source in (*spec.data.train, *spec.data.eval):
            rows = tokenised(source, renderer, task=spec.task, cache=cache)
            say(str(kept[-1]))
            bad += [Problem(*problem) for problem in rows.account.bad]
    num_bytes, seconds = sum(one.num_bytes for one in kept), time.monotonic() - began
    say(f"{num_bytes / 1e6:,.1f} MB of tokens in {folder}, after {seconds:.1f} s")
    if bad:
        raise data_error(bad, "mistake in the data", "mistakes in the data")
    say(f"next: deepspeed dsft/train.py {' '.join([str(spec_path), *overrides])}")
