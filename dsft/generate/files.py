"""Write the files that follow from a spec (DeepSpeed JSON, hostfile, launch scripts): `dsft generate`.

The texts depend only on the spec, on the model's config if the spec names a local folder, and on the spec's
path relative to the output folder, so they are the same on every machine.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsft.errors import StorageError
from dsft.generate.hostfile import render
from dsft.generate.scripts import deepspeed_script, environment_file, environment_text
from dsft.generate.slurm import slurm_script
from dsft.generate.torchrun import torchrun_script
from dsft.plan.census import known_elements
from dsft.plan.ds_config import deepspeed_config
from dsft.plan.load import cluster_batch, load
from dsft.plan.reference import dpo_of, has_engine, in_stages, reference_config, reference_model
from dsft.spec.schema import Spec

TRAIN = Path(__file__).resolve().parents[1] / "train.py"


def generate_files(spec_path: Path, overrides: Sequence[str], out: Path, *, check: bool) -> bool:
    """Write the files below `out` and print their names; with `check`, print the differences instead. Return
    False if there are any."""
    spec = load(spec_path, overrides, check_files=False)
    texts = files(spec, spec_path, out, overrides)
    if check:
        difference = drift(texts, out)
        print(difference or f"{len(texts)} files agree with {spec_path}\n", end="")
        return not difference
    write(texts, out)
    for name in texts:
        print(f"wrote {out / name}")
    if known_elements(spec.model) is None:
        print("bucket sizes are the maximum, since the model's files are not here; a run computes its own")
    if spec.cluster is None:
        print("no hostfile and no scripts for torchrun and Slurm, since the spec has no cluster")
    elif f"scripts/launch/{spec.name}.slurm.sh" not in texts:
        print("no script for Slurm, since sbatch cannot request hosts with unequal slots")
    return True


def files(spec: Spec, spec_path: Path, out: Path, overrides: Sequence[str] = ()) -> dict[str, str]:
    """Return the texts: path below `out` -> text. Launch scripts include the overrides, so they train what
    the other files describe.

    Raise SpecError if the cluster's size does not fit the batch or the pipeline.
    """
    train, spec_from_out = (_relative(out, path) for path in (TRAIN, spec_path))
    config = deepspeed_config(spec, cluster_batch(spec), known_elements(spec.model))
    texts = {f"ds_configs/{spec.name}.json": json_text(config)}
    if has_engine(spec) and not in_stages(spec) and dpo_of(spec).reference == "live":
        elements = known_elements(reference_model(spec))
        texts[f"ds_configs/{spec.name}.reference.json"] = json_text(reference_config(spec, elements))
    if spec.cluster is not None:
        texts[f"hostfiles/{spec.name}"] = render(spec.cluster.hosts)
    script = deepspeed_script(spec.cluster, spec.name, train, spec_from_out, overrides)
    texts[f"scripts/launch/{spec.name}.deepspeed.sh"] = script
    variables = environment_text(spec.cluster)
    if variables is not None:
        texts[environment_file(spec.name)] = variables
    if spec.cluster is not None:
        parts = (spec.cluster, spec.name, train, spec_from_out, overrides)
        texts[f"scripts/launch/{spec.name}.torchrun.sh"] = torchrun_script(*parts)
        for_slurm = slurm_script(*parts)
        if for_slurm is not None:
            texts[f"scripts/launch/{spec.name}.slurm.sh"] = for_slurm
    return texts


def json_text(config: Mapping[str, Any]) -> str:
    return json.dumps(config, indent=2) + "\n"


def write(texts: Mapping[str, str], out: Path) -> None:
    """Write each text below `out`; make scripts executable. Raise StorageError if that fails."""
    for name, text in texts.items():
        path = out / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode("utf-8", "surrogateescape"))  # arguments may have any bytes
            if path.suffix == ".sh":
                path.chmod(0o755)
        except OSError as error:
            raise StorageError(
                f"{path}: cannot be written ({error.strerror}); give another folder with --out"
            ) from error


def drift(texts: Mapping[str, str], out: Path) -> str:
    """Return a unified diff from the files below `out` to the texts; empty if nothing differs."""
    parts: list[str] = []
    for name, text in texts.items():
        path = out / name
        found = path.read_bytes().decode("utf-8", "surrogateescape") if path.is_file() else ""
        lines = (found.splitlines(keepends=True), text.splitlines(keepends=True))
        parts += difflib.unified_diff(*lines, fromfile=f"{name} (on disk)", tofile=f"{name} (from the spec)")
    return "".join(parts)


def _relative(out: Path, path: Path) -> str:
    return Path(os.path.relpath(path.resolve(), out.resolve())).as_posix()
