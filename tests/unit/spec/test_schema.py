from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from dsft.spec.aliases import sections_in
from dsft.spec.schema import Data, Optim, Parallel, Spec, Train
from tests.specs import spec_values


def sections(section: type[BaseModel] = Spec) -> Iterator[type[BaseModel]]:
    yield section
    for field in section.model_fields.values():
        for inner in sections_in(field.annotation):
            yield from sections(inner)


def test_every_section_is_frozen_strict_and_closed() -> None:
    for section in sections():
        assert section.model_config["frozen"] and section.model_config["strict"]
        assert section.model_config["extra"] == "forbid"


@pytest.mark.parametrize(("section", "key", "wrong"), [
    *((Data, "max_length", wrong) for wrong in ("8", 8.0, True, None)),
    *((Optim, "learning_rate", wrong) for wrong in ("1e-5", True, None, float("nan"), float("inf"), 0)),
    (Optim, "betas", [True, 0.9]),
])  # fmt: skip
def test_a_number_is_taken_in_its_own_type_only(section: type[BaseModel], key: str, wrong: Any) -> None:
    valid = {"train": [{"path": "x.jsonl"}]} if section is Data else {"learning_rate": 1e-3}
    section.model_validate(valid)
    with pytest.raises(ValidationError):
        section.model_validate(valid | {key: wrong})


def test_a_whole_number_is_a_number() -> None:
    learning_rate = Optim.model_validate({"learning_rate": 1}).learning_rate
    assert learning_rate == 1.0 and isinstance(learning_rate, float)


def test_defaults_are_those_of_the_design() -> None:
    train = Train()
    assert (train.num_train_epochs, train.max_steps, train.eval_every, train.log_every) == (1, None, None, 1)
    assert (train.precision, train.max_grad_norm, train.seed) == ("bf16", 1.0, 42)
    optim = Optim(learning_rate=1.0)
    assert (optim.betas, optim.eps) == ((0.9, 0.999), 1e-8)


@pytest.mark.parametrize(("sections", "stage"), [
    ({}, 2),
    ({"parallel": {"offload_optimizer": {"device": "cpu"}}}, 2),
    ({"parallel": {"zero_stage": 1}}, 1),
    ({"parallel": {"pipeline_stages": 2}}, 1),
    ({"train": {"precision": "fp32"}}, 1),
    ({"train": {"precision": "fp16"}}, 1),
    ({"cluster": {"hosts": {"a": 2}, "accelerator": {"name": "H100"}}}, 2),
    ({"cluster": {"hosts": {"a": 2}, "accelerator": {"name": "CPU"}}}, 1),
])  # fmt: skip
def test_the_default_of_zero_stage_follows_from_the_spec_alone(sections: dict[str, Any], stage: int) -> None:
    values = spec_values("sft")
    spec = Spec.model_validate(values | sections)
    assert spec.parallel.zero_stage == stage
    assert Spec.model_validate(spec.model_dump()).parallel == spec.parallel
    assert Spec.model_validate(values).parallel.zero_stage == 2  # the schema's own default has not changed
    assert Parallel().zero_stage == 1
