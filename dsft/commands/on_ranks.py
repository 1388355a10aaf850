"""Start ranks of this machine that do something with a spec's model instead of training it, as
`dsft.run.action` says, and return what they have found."""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsft.errors import SpecError
from dsft.rank.start import run_ranks
from dsft.reference.start import SCRIPT
from dsft.remote import without_rank_variables
from dsft.spec.load import dump_spec, load_spec
from dsft.spec.schema import Spec
from dsft.system.files import temporary_folder
from dsft.system.json_file import read_json

ASKED, RESULT, SPEC = "asked.json", "result.json", "asked.yaml"
CHANGED = (
    "train.eval_every=null", "train.eval_on_start=false", "checkpoint.keep_best=null",
    "checkpoint.resume=never", "wandb.mode=disabled", "parallel.zero_hpz_partition_size=1",
)  # fmt: skip
"""Overrides of a spec that is not to be trained."""


def on_ranks(
    asked: Mapping[str, Any], spec: Spec, processes: int, result: Path, *, quiet: bool
) -> tuple[int, Any]:
    """Run the ranks, and return the exit code and their result, which is written to `result`; None if they
    failed. asked: JSON, with the `action`. quiet: what they print goes to standard error. Raises DsftError.

    The ranks work in a folder of their own in the spec's output_dir, which is removed at the end."""
    spec = spec.model_copy(update={"name": f"{asked['action']}-{secrets.token_hex(4)}"})
    folder = Path(spec.output_dir, spec.name)
    with temporary_folder(folder):
        (folder / ASKED).write_text(json.dumps({**asked, "result": RESULT}), encoding="utf-8")
        (folder / SPEC).write_text(dump_spec(spec), encoding="utf-8")
        words = "--any_ranks", "--action", str(folder / ASKED)
        argv = [sys.executable, str(SCRIPT), str(folder / SPEC), *words]
        code = run(argv, without_rank_variables(os.environ), processes, quiet=quiet)
        if code:
            return code, None
        (folder / RESULT).replace(result)
        return 0, read_json(result)


def run(argv: Sequence[str], environ: Mapping[str, str], ranks: int, *, quiet: bool) -> int:
    """Run the ranks. quiet: what they print goes to standard error, as standard output is for the JSON."""
    return run_ranks(argv, environ, ranks, "nothing was written.", 2 if quiet else None)


def spec_of(text: str, words: Sequence[str], title: str) -> Spec:
    """Return the spec in a text, with overrides. Raises SpecError with this title."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        try:
            return load_spec(file.name, words)
        except SpecError as error:
            raise SpecError(title, error.problems) from None
