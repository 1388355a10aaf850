"""Name the packages with which a spec records its run, and which of them are missing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

from dsft.errors import MissingInputError
from dsft.report.wandb_run import mode_of
from dsft.spec.schema import Spec
from dsft.system.software import SINKS


def packages(spec: Spec) -> list[str]:
    """Return the package of each sink that the spec asks for."""
    records = spec.wandb is not None and mode_of(spec.wandb, os.environ) != "disabled"
    asked = spec.tensorboard, spec.swanlab is not None, records
    return [package for package, is_set in zip(SINKS, asked, strict=True) if is_set]


def missing(package: str) -> str:
    """Return the message for a sink whose package is not installed."""
    way = f"pip install {package}, or remove the key"
    return f"{package} is set in the spec, but the package {package} is not installed; {way}"


def missing_packages(spec: Spec) -> Iterator[str]:
    """Yield a message for each sink of the spec whose package is not installed here."""
    yield from (missing(package) for package in packages(spec) if find_spec(package) is None)


def check_installed(spec: Spec) -> None:
    """Raise MissingInputError for a sink that the spec asks for and whose package is not installed."""
    for message in missing_packages(spec):
        raise MissingInputError(f"{message}.")
