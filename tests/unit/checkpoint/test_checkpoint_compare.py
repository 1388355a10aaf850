"""What a resume may change, and what makes it another run."""

from pathlib import Path
from typing import Any

import pytest

from dsft.checkpoint.compare import (
    changed_since,
    check_same_base,
    check_same_model,
    check_same_run,
    other_rows,
)
from dsft.checkpoint.read import CheckpointReader
from dsft.errors import CheckpointError
from dsft.spec.batch import BatchSizes
from dsft.spec.schema import Spec
from tests.specs import spec_values

BASE = spec_values(
    model={"from_config": {"model_type": "llama", "hidden_size": 64}},
    data={"train": [{"path": "a.jsonl"}]}, train={"global_batch_size": 8, "micro_batch_size": 2},
)  # fmt: skip


def spec_with(**changes: Any) -> Spec:
    """`section__key=value` sets one key, `section=value` a section."""
    values = {key: dict(value) if isinstance(value, dict) else value for key, value in BASE.items()}
    for path, value in changes.items():
        section, _, key = path.partition("__")
        if key:
            values[section] = {**values.get(section, {}), key: value}
        else:
            values[section] = value
    return Spec.model_validate(values)


def rows_of(fingerprint: str | None = None, **rows: int) -> dict[str, Any]:
    return {
        f"data.train {name}": {"rows": count, "tokens": 10 * count, "fingerprint": fingerprint or f"{count}"}
        for name, count in rows.items()
    }


def checkpoint() -> CheckpointReader:
    state = {
        "progress": {"step": 7},
        "spec": spec_with().model_dump(mode="json"),
        "batch": {"global_batch_size": 8, "micro_batch_size": 2, "accumulation_steps": 2, "data_parallel": 2},
        "data": rows_of(a=10),
    }
    return CheckpointReader(Path("step-7"), {}, state, "")


SAME = BatchSizes(8, 2, 2, 2)
SAMPLED = "068e122283f954b91873e060647a786247ca4e5b9b3ad2f6bc46ed4095623a16"
"""What dsft wrote of the file below when it compared samples."""


@pytest.mark.parametrize("changes", [
    {},
    {"name": "moved", "output_dir": "/elsewhere"},
    {"parallel": {"zero_stage": 3, "offload_optimizer": {"device": "cpu"}}},
    {"parallel": {"sequence_parallel": 2}},
    {"cluster": {"hosts": {"a": 2, "b": 2}}},
    {"wandb__project": "other"},
    {"checkpoint__every": 5},
    {"train__global_batch_size": None, "train__accumulation_steps": 2},
    {"train__micro_batch_size": 1},
    {"data__packing": True, "data__max_tokens_per_micro_batch": 4096},
    {"train__max_steps": 50},
    {"train__num_train_epochs": 9.0},
    {"train__log_every": 3, "train__eval_every": 4},
    {"data__train": [{"path": "a.jsonl", "columns": {"margin": "none"}}]},
], ids=str)  # fmt: skip
def test_changes_that_are_allowed(changes: dict[str, Any]) -> None:
    check_same_run(checkpoint(), spec_with(**changes), BatchSizes(8, 1, 2, 4), rows_of(a=10))


@pytest.mark.parametrize(("changes", "message"), [
    ({"train__seed": 1}, "train.seed was 42, now 1"),
    ({"train__precision": "fp32"}, "train.precision was 'bf16', now 'fp32'"),
    ({"optim__learning_rate": 2e-3}, "optim.learning_rate was 0.001, now 0.002"),
    ({"optim__betas": (0.9, 0.95)}, "optim.betas.1 was 0.999, now 0.95"),
    ({"data__train": [{"path": "a.jsonl", "columns": {"text": "body"}}]}, "data.train.0.columns.text was"),
    ({"data__train": [{"path": "b.jsonl"}]}, "data.train.0.path was 'a.jsonl', now 'b.jsonl'"),
    ({"data__train": [{"path": "a.jsonl"}, {"path": "b.jsonl"}]},
     "data.train.1.path was (not set), now 'b.jsonl'"),
    ({"model__from_config": {"model_type": "llama", "hidden_size": 32}},
     "model.from_config.hidden_size was 64, now 32"),
    ({"task": "sft"}, "task was 'pretrain', now 'sft'"),
    ({"data__chat_template": "chatml"}, "data.chat_template was null, now 'chatml'"),
    ({"data__packing": True, "train__tf32": True}, "train.tf32 was false, now true"),
    ({"model__lora": {}}, "model.lora.alpha was (not set), now"),
], ids=str)  # fmt: skip
def test_changes_are_refused_with_both_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        check_same_run(checkpoint(), spec_with(**changes), SAME, rows_of(a=10))
    assert f"step-7, because this run differs: {message}" in str(error.value)
    assert "To resume, set the keys back; for a new run, choose another name." in str(error.value)


def test_key_that_restores_the_batch_is_named() -> None:
    per_rank = {"train__global_batch_size": None, "train__micro_batch_size": 2}
    with pytest.raises(CheckpointError) as error:
        check_same_run(
            checkpoint(), spec_with(**per_rank, train__accumulation_steps=2), BatchSizes(4, 2, 2, 1), None
        )
    assert str(error.value).endswith(
        "train.global_batch_size was 8, now 4. To resume, set train.accumulation_steps=4 (with 1 "
        "data-parallel rank, micro_batch_size 2); for a new run, choose another name."
    )
    with pytest.raises(CheckpointError, match="To resume, set train.global_batch_size=8; for a new run"):
        check_same_run(checkpoint(), spec_with(train__global_batch_size=4), BatchSizes(4, 2, 2, 1), None)
    with pytest.raises(CheckpointError, match="11 rows of 110 tokens. To resume, put the rows back as they"):
        check_same_run(checkpoint(), spec_with(), SAME, rows_of(a=11))


def test_all_differences_at_once_with_the_batch_and_the_rows() -> None:
    with pytest.raises(CheckpointError) as error:
        check_same_run(
            checkpoint(), spec_with(train__seed=1, task="sft"), BatchSizes(16, 2, 4, 2), rows_of(a=11)
        )
    assert (
        "task was 'pretrain', now 'sft'; train.seed was 42, now 1; "
        "train.global_batch_size was 8, now 16; "
        "data.train a had 10 rows of 100 tokens, now 11 rows of 110 tokens" in str(error.value)
    )


@pytest.mark.parametrize(("data", "message"), [
    (rows_of(a=10, fingerprint="other"),
     "a had 10 rows of 100 tokens, now the same number of different rows"),
    (rows_of(b=10), "data.train a is not there now; data.train b was not there"),
    (rows_of(a=10, b=3), "data.train b was not there"),
], ids=str)  # fmt: skip
def test_changed_rows_are_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        check_same_run(checkpoint(), spec_with(), SAME, data)
    assert f"{message}. To resume, put the rows back" in str(error.value)
    check_same_run(checkpoint(), spec_with(), SAME, None)  # not read yet


def test_checkpoint_of_an_earlier_dsft_is_refused() -> None:
    assert list(other_rows("a sha256", rows_of(a=1))) == [
        "its rows were fingerprinted by an earlier dsft, and cannot be compared"
    ]


def test_frozen_weights_must_be_unchanged() -> None:
    found = checkpoint()
    found.state["spec"]["model"]["name_or_path"] = "models/a"
    check_same_base(found, None, {})  # everything is trained
    found.state["base"] = {"1.safetensors": "abc", "2.safetensors": "def"}
    check_same_base(found, "models/a", {"1.safetensors": "abc", "2.safetensors": "def"})
    expected = (
        r"on top of the weights in model\.name_or_path 'models/a', and these have changed since: the weight "
        r"file 1\.safetensors has changed; the weight file 2\.safetensors is missing now; the weight file "
        r"3\.safetensors is new\. Put"
    )
    with pytest.raises(CheckpointError, match=expected):
        check_same_base(found, "models/a", {"1.safetensors": "abd", "3.safetensors": "def"})


def test_samples_of_frozen_weights_from_an_older_dsft_are_compared(tmp_path: Path) -> None:
    content = bytes(range(256)) * 4096
    (tmp_path / "model.safetensors").write_bytes(content)
    found = checkpoint()
    found.state["base"] = [["model.safetensors", 1048576, SAMPLED]]
    check_same_base(found, str(tmp_path), {"model.safetensors": "a digest"})
    (tmp_path / "model.safetensors").write_bytes(b"?" + content[1:])
    with pytest.raises(CheckpointError, match=r"the weight file model\.safetensors has changed"):
        check_same_base(found, str(tmp_path), {"model.safetensors": "a digest"})


SOFTWARE: dict[str, Any] = {
    "versions": {"torch": "2.12.0", "transformers": "5.23.0", "tokenizers": "0.23.3"},
    "device": "cpu",
}
BUILT: dict[str, Any] = {
    "config.json": {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 1e4}},
    "tokenizer": "1a2b",
    "chat template": "a",
}


def checkpoint_of(built_from: dict[str, Any], software: dict[str, Any] = SOFTWARE) -> CheckpointReader:
    state = checkpoint().state | {"built_from": built_from, "software": software}
    return CheckpointReader(Path("step-7"), {}, state, "")


def test_model_config_is_compared_by_key() -> None:
    check_same_model(checkpoint_of(BUILT), BUILT, SOFTWARE)
    check_same_model(checkpoint(), BUILT, SOFTWARE)  # of an older dsft, which did not write it
    other = BUILT | {"config.json": {"rms_norm_eps": 0.5, "rope_parameters": {"rope_theta": 3.0}}}
    with pytest.raises(CheckpointError) as error:
        check_same_model(checkpoint_of(BUILT), other | {"tokenizer": "ffff"}, SOFTWARE)
    assert "config.json.rms_norm_eps was 1e-06, now 0.5; " in str(error.value)
    assert "config.json.rope_parameters.rope_theta was 10000.0, now 3.0; " in str(error.value)
    assert "tokenizer was '1a2b', now 'ffff'. " in str(error.value)


def test_other_library_versions_may_add_config_keys() -> None:
    older = SOFTWARE | {"versions": SOFTWARE["versions"] | {"transformers": "5.22.0"}}
    other = BUILT | {"config.json": BUILT["config.json"] | {"new_key": 1}, "tokenizer": "ffff"}
    check_same_model(checkpoint_of(BUILT, older), other, SOFTWARE)
    with pytest.raises(CheckpointError, match=r"config.json.new_key was \(not set\), now 1; tokenizer was"):
        check_same_model(checkpoint_of(BUILT), other, SOFTWARE)
    with pytest.raises(CheckpointError, match="chat template was 'a', now 'b'"):
        check_same_model(checkpoint_of(BUILT, older), other | {"chat template": "b"}, SOFTWARE)


def test_difference_in_a_long_template_is_shown() -> None:
    long = "x" * 300
    held = checkpoint_of({"chat template": long + "A" + long})
    with pytest.raises(CheckpointError) as error:
        check_same_model(held, {"chat template": long + "B" + long}, SOFTWARE)
    assert f"was …'{'x' * 20}A{'x' * 19}'…, now …'{'x' * 20}B{'x' * 19}'…." in str(error.value)


def test_changed_software_is_reported_and_not_refused() -> None:
    assert list(changed_since(checkpoint_of(BUILT), SOFTWARE)) == []
    now = SOFTWARE | {"versions": SOFTWARE["versions"] | {"torch": "2.13.0"}}
    assert list(changed_since(checkpoint_of(BUILT), now)) == [
        "warning: versions.torch was '2.12.0', now '2.13.0', since step-7 was saved"
    ]


def test_a_key_that_the_checkpoint_does_not_know_differs_where_it_is_not_the_default() -> None:
    old = checkpoint()
    del old.state["spec"]["model"]["kernels"], old.state["spec"]["train"]["tf32"]
    check_same_run(old, spec_with(), SAME, rows_of(a=10))
    with pytest.raises(CheckpointError, match=r"train\.tf32 was \(not set\), now true\. To resume, set"):
        check_same_run(old, spec_with(train__tf32=True), SAME, rows_of(a=10))
