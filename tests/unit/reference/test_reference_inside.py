"""A reference that an engine scores: what is filled, what is switched, what is proved, on one process."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dsft.data.steps.batch import NO_TARGET, Answers, MicroBatch
from dsft.engine.partition import Snapshot
from dsft.errors import WorldError
from dsft.model.build import build_model
from dsft.model.config import TokenFacts
from dsft.model.policy import Policy
from dsft.plan.reference import reference_model
from dsft.reference.check import check_weights
from dsft.reference.key import Key, weights_of
from dsft.reference.refer import adapter_off, refer_to_start, with_scores
from dsft.spec.schema import Spec
from tests.make import make_micro_batch
from tests.specs import llama, minimal_spec

FACTS = TokenFacts(32, bos_token_id=1, eos_token_id=2, pad_token_id=None)
LLAMA = llama(16, 32, 2, 2, 2, max_position_embeddings=32, initializer_range=0.2)


def spec(tmp_path: Path, model: dict[str, Any], **dpo: Any) -> Spec:
    train = {"global_batch_size": 4, "precision": "fp32"}
    data = {"train": [{"path": "pairs.jsonl"}]}
    return minimal_spec("dpo", model=model, data=data, train=train, dpo=dpo, output_dir=str(tmp_path))


def micro_batch() -> MicroBatch:
    ids = torch.arange(16).view(2, 8)
    targets = ids.roll(-1, 1).masked_fill(torch.arange(8) < 3, NO_TARGET)
    targets[:, -1] = NO_TARGET
    return make_micro_batch(
        ids, torch.arange(8).repeat(2, 1), targets, answers=Answers(torch.tensor([0]), torch.tensor([[4, 4]]))
    )


class Alone:
    """One rank, and an engine that is the policy itself."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy

    def score(self, micro_batches: Sequence[MicroBatch], kept: Any, *, training: bool = False) -> Any:
        with torch.no_grad():
            self.policy.train(training)
            return tuple(kept(self.policy(b.tokens.input_ids, b.tokens).logps, b) for b in micro_batches)

    def snapshot(self, parameters: Any) -> Snapshot:
        return Snapshot(SimpleNamespace(zero_optimization_stage=lambda: 0), parameters)

    def gather(self, mine: Any) -> list[Any]:
        return [mine]

    def each(self, work: Any) -> Any:
        return work()


def reference_of(found: Sequence[MicroBatch]) -> Tensor:
    assert found[0].answers is not None and found[0].answers.reference is not None
    return found[0].answers.reference


def moved(policy: Policy) -> None:
    """As training would, and far."""
    with torch.no_grad():
        for parameter in policy.named_trained().values():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("lora", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}])
def test_the_reference_of_a_new_adapter_is_the_model_without_it(tmp_path: Path, lora: dict[str, Any]) -> None:
    made = spec(tmp_path, {"from_config": LLAMA, "lora": {"rank": 2, **lora}}, reference="adapter")
    policy = build_model(made.model, FACTS, 1, torch.float32)
    base = build_model(made.model.model_copy(update={"lora": None}), FACTS, 1, torch.float32)
    held = refer_to_start(policy, Alone(policy), made)  # type: ignore[arg-type]
    moved(policy)
    after = [p.detach().clone() for p in policy.parameters()]
    wanted = Alone(base).score([micro_batch()], lambda logps, batch: logps.double().sum(1))[0]
    assert torch.allclose(reference_of(held([micro_batch()]))[0], wanted, rtol=1e-6, atol=0)
    assert all(torch.equal(p, a) for p, a in zip(policy.parameters(), after, strict=True))


def test_the_adapter_is_on_again_after_an_error() -> None:
    policy = build_model(
        spec(Path(), {"from_config": LLAMA, "lora": {"rank": 2}}).model, FACTS, 1, torch.float32
    )
    moved(policy)
    own = Alone(policy).score([micro_batch()], lambda logps, batch: logps)[0]

    def fail() -> None:
        with adapter_off(policy):
            assert not torch.equal(Alone(policy).score([micro_batch()], lambda logps, _: logps)[0], own)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert torch.equal(Alone(policy).score([micro_batch()], lambda logps, batch: logps)[0], own)
    assert all(p.requires_grad for p in policy.named_trained().values()) and policy.named_trained()


def test_remembered_values_come_and_go_without_a_copy() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    remembered = Alone().snapshot([parameter])
    parameter.data += 1
    place = parameter.data_ptr()

    @contextmanager
    def failing() -> Iterator[None]:
        with remembered.in_place():
            assert parameter.tolist() == [0, 0, 0]
            raise KeyError
            yield

    with pytest.raises(KeyError), failing():
        pass
    assert parameter.tolist() == [1, 1, 1] and parameter.data_ptr() == place
    assert remembered.values[0].tolist() == [0, 0, 0]


def test_micro_batches_are_filled_when_they_are_asked_for() -> None:
    scored = [torch.tensor([[-1.0, -2.0]]), torch.tensor([[-3.0, -4.0]])]
    batches = with_scores([micro_batch()] * 2, scored)
    assert len(batches) == 2
    filled = [b.answers.reference for b in batches if b.answers and b.answers.reference is not None]
    assert [values.tolist() for values in filled] == [[[-1.0, -2.0]], [[-3.0, -4.0]]]
    assert torch.equal(reference_of(batches[1:]), scored[1])
    same = [micro_batch()]
    assert with_scores(same, []) is same  # a rank without the last stage


def test_files_that_have_changed_stop_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(3)}, folder / "model.safetensors")
    asked = spec(tmp_path, {"name_or_path": str(folder)})
    key = Key(weights_of(asked, reference_model(asked)))
    check_weights(asked, key)
    save_file({"a": torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(WorldError, match=r"weight file model\.safetensors has changed"):
        check_weights(asked, key)
    fresh = spec(tmp_path, {"from_config": {"model_type": "llama"}})
    check_weights(fresh, Key(weights_of(fresh, reference_model(fresh))))
