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
from dsft.plan.promised import load
from dsft.report.console import shown
from dsft.spec.preferences import shares_prompts

say = partial(print, flush=True)


def build(spec_path: Path, overrides: Sequence[str]) -> None:
    """Tokenize the spec's data and print what the cache then holds. Raises what a run would raise for the
    same data."""
    began = time.monotonic()
    spec = load(spec_path, overrides)
    tokenizer, _ = open_tokenizer(spec.model)
    choose_template(tokenizer, spec.data.chat_template)
    folder, num_bytes = cache_folder(spec), 0

    def tell(kept: CacheSummary) -> None:
        nonlocal num_bytes
        num_bytes += kept.num_bytes
        say(str(kept))

    try:
        with shown(say) as progress:
            cache = Cache(folder, spec.data.num_workers, say, progress, tell)
            loaded = load_data(spec, tokenizer, cache, share_prompts=shares_prompts(spec))
    except KeyboardInterrupt:
        say(f"stopped: what is made stays in {folder}, and the same command goes on from there")
        raise
    for line in loaded.lines:
        say(line)
    say(
        f"{folder}: {num_bytes / 1e6:,.1f} MB of tokens for this spec, after {time.monotonic() - began:.1f} s"
    )
    say(f"next: dsft launch {shlex.join([str(spec_path), *overrides])}")
