"""Find out whether the Hugging Face hub answers, once per process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from dsft.errors import brief

PATIENCE = 10.0  # seconds


def is_hub_id(name: str) -> bool:
    """Return whether a name that is no file or folder may be an id of the hub."""
    return not (name[:1] in "./~" or Path(name).exists())


@cache
def hub_obstacle() -> str | None:
    """Return a clause on why models and data sets can come from the cache alone; None where the hub answers.

    One request is made. Where it fails, HF_HUB_OFFLINE=1 is set for this process and those that it starts:
    huggingface_hub (1.0 and newer) would repeat the request for each missing file for half a minute.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE=1 is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception as error:  # of the HTTP library, which is another one before huggingface_hub 1.0
        use_cache_only()
        return f"{constants.ENDPOINT} does not answer ({brief(error)}; HF_HUB_OFFLINE=1 would not ask it)"
    return None


def use_cache_only() -> None:
    """Have this process, and those that it starts, take models and data sets from the hub's cache alone."""
    from huggingface_hub import constants

    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True


@contextmanager
def cache_only(wanted: bool) -> Iterator[None]:
    """Use the hub's cache alone during the block, if that is `wanted`."""
    from huggingface_hub import constants

    before, was_set = os.environ.get("HF_HUB_OFFLINE"), constants.HF_HUB_OFFLINE
    if wanted:
        use_cache_only()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = was_set
        if before is None:
            os.environ.pop("HF_HUB_OFFLINE", None)
        else:
            os.environ["HF_HUB_OFFLINE"] = before
