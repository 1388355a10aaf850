"""Load data sets of the hub with `datasets`, as Arrow files in its cache.

Only this module imports `datasets`. The network is used if the cache does not have the data set. Code of the
repository is never run: `datasets` does not support that since version 4.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from dsft.errors import MissingInputError
from dsft.spec.sources import HUB_FORM, HubData

_COMMIT = re.compile(r"[0-9a-f]{40}")


def hub_files(name: str, hub: HubData) -> tuple[list[Path], list[str]]:
    """Return the Arrow files of a data set, and a note with its revision. Raises MissingInputError if it
    cannot be loaded or has no row."""
    import datasets

    try:
        data = datasets.load_dataset(hub.id, hub.subset, split=hub.split, revision=hub.revision)
    except Exception as error:  # of many libraries: no connection, unknown id, split or subset, no access
        raise MissingInputError(_refusal(name, error)) from error
    files = [Path(entry["filename"]) for entry in data.cache_files]
    if not files:
        raise MissingInputError(f"data {name}: the split {hub.split} of {hub.id} holds no row; name another")
    commits = [part for part in files[0].parts if _COMMIT.fullmatch(part)]
    revision = commits[-1] if commits else "not known"
    if _COMMIT.fullmatch(hub.revision or "") and revision != hub.revision:  # offline, `datasets` takes any
        raise MissingInputError(
            f"data {name}: this machine's cache has revision {revision} alone; name that, or load yours first"
        )
    note = f"{name}: from the hub, split {hub.split}, revision {revision}, {len(data):,} rows"
    return files, [note]


def _refusal(name: str, error: Exception) -> str:
    said = " ".join(str(error).split())[:200] or type(error).__name__
    offline = [
        key for key in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") if os.environ.get(key, "0") not in ("", "0")
    ]
    if offline:
        way_out = f"unset {offline[0]}, or load it once into this machine's cache"
    else:
        way_out = (
            f"correct the path ({HUB_FORM}), set HF_ENDPOINT to a mirror that is reached, or HF_TOKEN for "
            "data that are private"
        )
    return f"data {name}: neither here nor to be had from the hub ({said}); {way_out}"
