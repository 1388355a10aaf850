"""What `dsft rehearse` refuses, and its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dsft.commands.rehearse import largest_micro_batch, rehearse
from dsft.errors import SpecError
from tests.specs import llama, minimal_spec


@pytest.mark.parametrize(
    ("ranks", "sections", "words"),
    [
        (0, {}, "0 is not between 1 and 512"),
        (513, {}, "513 is not between 1 and 512"),
        (9, {"parallel": {"pipeline_stages": 2, "zero_stage": 1}}, "2 does not divide the 9 processes"),
        (3, {"train": {"global_batch_size": 8}}, "does not hold"),
        (2, {"parallel": {"zero_stage": 2, "offload_optimizer": {"device": "cpu"}}}, "does not know"),
        (
            2,
            {"model": {"from_config": llama(16, 32, 4, 2), "lora": {"rank": 2}}},
            "model.lora: dsft rehearse",
        ),
        (2, {"optim": {"name": "muon"}}, "know 'muon' yet"),
    ],
)
def test_what_cannot_be_rehearsed_is_said_in_a_sentence(
    tmp_path: Path, ranks: int, sections: dict[str, Any], words: str
) -> None:
    given = {"model": {"from_config": llama(16, 32, 4, 2)}} | sections
    data = {"train": [{"path": "rows.jsonl"}], "packing": True, "max_length": 16}
    spec = minimal_spec(data=data, **given)
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")
    with pytest.raises(SpecError, match=words) as found:
        rehearse(path, (), ranks, as_json=False)
    assert len(str(found.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("task", "packing", "shape", "segments"),
    [
        ("pretrain", True, (1, 40), (16, 16, 8)),
        ("pretrain", False, (3, 16), None),
        ("dpo", True, (1, 32), (16, 16)),
        ("dpo", False, (6, 16), None),
    ],
)
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
        assert found.answers.num_targets.tolist() == [[16, 16]] * (1 if packing else 3)
