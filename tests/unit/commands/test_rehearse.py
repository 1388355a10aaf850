"""What `dsft rehearse` refuses, and its report."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dsft.commands import rehearse as commands
from dsft.commands.rehearse import in_processes, largest_micro_batch, rehearse
from dsft.errors import SpecError, WorldError
from dsft.spec.load import load_spec
from dsft.spec.schema import Spec
from tests.specs import llama, minimal_spec

NVME = {"device": "nvme", "nvme_path": "/nowhere"}


@pytest.mark.parametrize(("ranks", "sections", "words"), [
    (0, {}, "0 is not between 1 and 512"),
    (513, {}, "513 is not between 1 and 512"),
    (9, {"parallel": {"pipeline_stages": 2, "zero_stage": 1}}, "2 does not divide the 9 processes"),
    (3, {"train": {"global_batch_size": 8}}, "does not hold"),
    (2, {"parallel": {"zero_stage": 3, "offload_optimizer": NVME}}, "know 'nvme' yet"),
    (2, {"optim": {"name": "muon"}}, "know 'muon' yet"),
])  # fmt: skip
def test_what_cannot_be_rehearsed_is_said_in_a_sentence(
    tmp_path: Path, ranks: int, sections: dict[str, Any], words: str
) -> None:
    given = {"model": {"from_config": llama(16, 32, 4, 2)}} | sections
    data = {"train": [{"path": "rows.jsonl"}], "packing": True, "max_length": 16}
    spec = minimal_spec(data=data, **given)
    with pytest.raises(SpecError, match=words) as found:
        rehearse(written(spec, tmp_path), (), ranks, as_json=False)
    assert len(str(found.value).splitlines()) == 2


def written(spec: Spec, folder: Path) -> Path:
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")
    return path


@pytest.mark.parametrize(("ranks", "hosts"), [
    (20, {"host0": 8, "host1": 8, "host2": 4}),
    (5, {"host0": 5}),
    (64, {f"a{n}": 8 for n in range(1, 9)}),
])  # fmt: skip
def test_a_spec_is_checked_with_the_ranks_that_are_rehearsed(
    tmp_path: Path, ranks: int, hosts: dict[str, int]
) -> None:
    stages = 5 if ranks % 5 == 0 else 4
    parallel = {"pipeline_stages": stages, "zero_stage": 1}
    cluster = {"hosts": {"a[1-8]": 8}, "min_hosts": 8}
    data = {"train": [{"path": "rows.jsonl"}]}
    model = {"from_config": llama(16, 32, 5, 2)}
    spec = minimal_spec(model=model, data=data, parallel=parallel, cluster=cluster)
    path = written(spec, tmp_path)
    found = load_spec(path, check_files=False, ranks=ranks)
    assert found.cluster is not None and found.cluster.hosts == hosts
    if stages == 5:
        with pytest.raises(SpecError, match="5 does not divide the 64 processes"):
            load_spec(path, check_files=False)


@pytest.mark.parametrize(("task", "packing", "shape", "segments"), [
    ("pretrain", True, (1, 40), (16, 16, 8)),
    ("pretrain", False, (3, 16), None),
    ("dpo", True, (1, 32), (16, 16)),
    ("dpo", False, (6, 16), None),
    ("kto", True, (1, 40), (16, 16, 8)),
])  # fmt: skip
def test_the_largest_micro_batch_is_full(
    task: str, packing: bool, shape: tuple[int, int], segments: tuple[int, ...] | None
) -> None:
    data = {"packing": packing, "max_length": 16} | ({"max_tokens_per_micro_batch": 40} if packing else {})
    spec = minimal_spec(task, data=data, train={"micro_batch_size": 3})
    found = largest_micro_batch(spec, 3, 40 if packing else None)
    assert (tuple(found.shape), found.segments and found.segments.lengths) == (shape, segments)
    assert found.tokens.position_ids.max() == 15
    if found.answers is not None:
        assert found.answers.reference is not None
        targets, lengths = found.answers.num_targets, segments or (shape[1],) * shape[0]
        assert (targets.shape[1], tuple(targets.flatten().tolist())) == (spec.task_kind.rows, lengths)
        labels = found.answers.values.get("label", torch.empty(0))
        assert labels.tolist() == [1] * len(targets) * (task == "kto")


def _killed(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_is_killed_ends_the_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "rehearse_rank", _killed)
    given: Any = None
    with pytest.raises(WorldError, match=r"process of a rehearsed rank was killed") as found:
        in_processes(given, given, (0, 1))
    assert "\n" not in str(found.value)
