"""What a run's folder says of how it was made, and what it keeps to itself."""

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from dsft.errors import LockedError
from dsft.plan.ds_entries import ConfigEntry, entries_of_run
from dsft.report.folder import Provenance, check_folder, write_folder

SPEC = "name: x\ncluster:\n  hosts: {a: 1}\n  env:\n    HF_TOKEN: canary-in-spec\n    NCCL_DEBUG: WARN\n"


def test_what_a_run_leaves(tmp_path: Path) -> None:
    origin = Provenance(
        SPEC,
        [ConfigEntry("zero_optimization.stage", 2, "why")],
        "a slots=1\n",
        ["dsft/train.py", "a b", "x=1"],
    )
    write_folder(tmp_path, origin)
    write_folder(tmp_path, origin)
    assert json.loads((tmp_path / "deepspeed.json").read_text()) == {"zero_optimization": {"stage": 2}}
    assert entries_of_run(tmp_path) == (ConfigEntry("zero_optimization.stage", 2, "why"),)
    assert (tmp_path / "hostfile").read_text() == "a slots=1\n"
    env = yaml.safe_load((tmp_path / "spec.yaml").read_text())["cluster"]["env"]
    assert env == {"HF_TOKEN": "(hidden)", "NCCL_DEBUG": "WARN"}  # still a spec
    versions = json.loads((tmp_path / "versions.json").read_text())
    assert versions["python"] == sys.version.split()[0] and versions["torch"].startswith("2.")
    starts = (tmp_path / "command.txt").read_text().splitlines()
    assert len(starts) == 2 and starts[0].endswith("  dsft/train.py 'a b' x=1")
    assert (tmp_path / "logs").is_dir()


def test_files_that_no_run_wrote_are_not_overwritten(tmp_path: Path) -> None:
    check_folder(tmp_path / "new")
    (tmp_path / "spec.yaml").write_text("name: mine")
    with pytest.raises(LockedError, match=r"that no run wrote.*\(spec.yaml\); choose another name"):
        check_folder(tmp_path)
    (tmp_path / "spec.yaml").unlink()
    write_folder(tmp_path, Provenance(SPEC, (), None, ["x"]))
    check_folder(tmp_path)


def test_a_run_without_a_hostfile_leaves_none(tmp_path: Path) -> None:
    write_folder(tmp_path, Provenance(SPEC, (), None, ["x"]))
    assert not (tmp_path / "hostfile").exists() and not (tmp_path / "data.json").exists()


def test_the_account_of_the_rows_is_kept(tmp_path: Path) -> None:
    account = {
        "train": {"total": {"tokens": 5, "trained_tokens": 3}, "sources": {"web": {"path": "a.jsonl"}}}
    }
    write_folder(tmp_path, Provenance(SPEC, (), None, ["x"], account, {"zero_optimization": {"stage": 3}}))
    assert json.loads((tmp_path / "reference.deepspeed.json").read_text())["zero_optimization"]["stage"] == 3
    assert json.loads((tmp_path / "data.json").read_text()) == account


def test_under_a_private_umask_every_file_is_the_users_own(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        (tmp_path / "run").mkdir()
        write_folder(tmp_path / "run", Provenance(SPEC, (), "node1 slots=1\n", ["x"], {}))
    finally:
        os.umask(before)
    made = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert len(made) > 5
    assert [path.name for path in made if path.stat().st_mode & 0o077] == []


def test_no_secret_in_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "canary-wandb")
    monkeypatch.setenv("HF_TOKEN", "canary-hf")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-aws")
    command = [
        "train.py", "--token=canary-1", "--api-key", "canary-2", "hub.token=canary-3", "canary-hf",
        "data.train.0.path=https://user:canary-4@host/x.jsonl", "a=canary-wandb/b",
    ]  # fmt: skip
    config = {"path": "/x/canary-aws", "token": "canary-5"}
    keys = [ConfigEntry(key, value, value) for key, value in config.items()]
    write_folder(tmp_path, Provenance(SPEC, keys, "canary-hf slots=1\n", command, config, config))
    assert (tmp_path / "hostfile").read_text() == "(hidden) slots=1\n"
    for path in filter(Path.is_file, tmp_path.rglob("*")):
        assert "canary" not in path.read_text(encoding="utf-8"), path.name
