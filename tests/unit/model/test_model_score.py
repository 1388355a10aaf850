"""Models that give scores: transformers' own classes, their scores, and how they start from the files of a
causal language model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoConfig

from dsft.data.steps.batch import NO_TARGET
from dsft.errors import DsftError, MissingInputError, SpecError
from dsft.model.build import Part, build_model
from dsft.model.config import TokenFacts, has_scores, resolve_config
from dsft.model.head import ScoreHead, output_layer
from dsft.model.policy import Policy
from dsft.model.weights import Sharding
from dsft.spec.schema import Lora, Model
from tests.architectures.cases import ARCHITECTURES, USUAL, keys_of
from tests.integration.runs import LLAMA, edit_json
from tests.make import logps_of

FACTS = TokenFacts(32, 1, 2, None)
SEED = 3


def scored(**keys: Any) -> Model:
    """A model section as task reward has it."""
    model = Model(**keys)
    model._head = "score"
    return model


def built(model: Model, seed: int = SEED, **more: Any) -> Policy:
    return build_model(model, FACTS, seed, torch.float32, **more).eval()


def llama(**keys: Any) -> Model:
    return scored(from_config=LLAMA | keys)


SOME = (*USUAL, "olmo2")


def kinds(only: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Those architectures of which transformers has such a class."""
    for kind in only:
        keys = {"model_type": kind} | keys_of(kind)
        if type(AutoConfig.for_model(**keys)) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            yield kind, keys


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("only", [SOME, pytest.param(tuple(ARCHITECTURES), marks=pytest.mark.long)], ids=len)
def test_architectures_give_the_scores_of_transformers(only: tuple[str, ...], tmp_path: Path) -> None:
    """Of a fresh model, and of one that starts from the files of the causal language model."""
    wrong, tried = [], 0
    ids = torch.randint(3, 30, (2, 9), generator=torch.Generator().manual_seed(0))
    targets = torch.full((2, 9), NO_TARGET)
    targets[0, 8], targets[1, 5] = ids[0, 8], ids[1, 5]
    for kind, keys in kinds(only):
        folder = tmp_path / kind
        try:
            fresh = built(scored(from_config=keys))
            build_model(Model(from_config=keys), FACTS, SEED, torch.float32).causal_lm.save_pretrained(folder)
            read = built(scored(name_or_path=str(folder)))
        except DsftError as error:
            wrong.append((kind, str(error)))
            continue
        tried += 1
        with torch.no_grad():
            ours, again = (logps_of(one, ids, torch.arange(9).repeat(2, 1), targets) for one in (fresh, read))
            model: Any = fresh.causal_lm
            model.score.__class__ = nn.Linear
            model.config.get_text_config().pad_token_id = None  # then the last token of one row is scored
            theirs = torch.stack([model(input_ids=one).logits[0, 0] for one in (ids[:1], ids[1:, :6])])
        found = torch.stack([ours[0, 8], ours[1, 5]])
        if not torch.equal(ours, again) or (found - theirs).abs().max() > 1e-6 or not theirs.all():
            wrong.append((kind, f"{found} {theirs} {again}"))
    assert not wrong, wrong
    assert tried > (6 if only == SOME else 40)


def test_head_returns_the_score_at_each_target_alone() -> None:
    policy = built(llama())
    head = output_layer(policy.causal_lm)
    assert type(head) is ScoreHead and head.weight.shape == (1, LLAMA["hidden_size"])
    hidden = torch.randn(2, 3, LLAMA["hidden_size"], requires_grad=True)
    targets = torch.tensor([[NO_TARGET, 7, NO_TARGET], [NO_TARGET, NO_TARGET, 0]])
    found = head(hidden, targets, 2)
    torch.testing.assert_close(found, (hidden @ head.weight[0]).masked_fill(targets == NO_TARGET, 0))
    assert found.count_nonzero() == 2
    found.sum().backward()
    assert hidden.grad is not None and hidden.grad[0, 0].abs().max() == 0 != hidden.grad[0, 1].abs().max()


def test_scores_are_float32_in_bf16() -> None:
    head = output_layer(build_model(llama(), FACTS, SEED, torch.bfloat16).causal_lm)
    hidden = torch.randn(1, 1, LLAMA["hidden_size"], dtype=torch.bfloat16)
    found = head(hidden, torch.zeros(1, 1, dtype=torch.int64), 1)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[0, 0], hidden[0, 0].float() @ head.weight[0].float())


@pytest.fixture
def causal(tmp_path: Path) -> Path:
    """The folder of a causal language model with a tied head."""
    model = Model(from_config=LLAMA | {"tie_word_embeddings": True})
    build_model(model, FACTS, 5, torch.float32).causal_lm.save_pretrained(tmp_path / "causal")
    return tmp_path / "causal"


def test_fresh_score_follows_from_the_seed_alone(causal: Path) -> None:
    """Whatever a rank keeps of it, and whether the model is read or fresh."""
    whole = built(llama()).named_trained()["score.weight"].detach().flatten()
    read = built(scored(name_or_path=str(causal)))
    assert torch.equal(read.named_trained()["score.weight"].flatten(), whole)
    assert "lm_head.weight" not in read.named_trained()
    parts: dict[int, torch.Tensor] = {}
    half = Sharding(
        span=lambda numel: (numel // 2, numel),
        take=lambda parameter, part: parts.update({parameter.numel(): part}) if part is not None else None,
    )
    built(scored(name_or_path=str(causal)), part=Part(sharding=half))
    assert torch.equal(parts[len(whole)], whole[len(whole) // 2 :])
    other = built(scored(name_or_path=str(causal)), seed=4).named_trained()["score.weight"].flatten()
    assert not torch.equal(other, whole)


def test_score_of_the_files_is_kept(causal: Path) -> None:
    policy = built(scored(name_or_path=str(causal)))
    policy.causal_lm.save_pretrained(causal.with_name("scored"))
    again = built(scored(name_or_path=str(causal.with_name("scored"))), seed=9)
    for name, value in policy.named_trained().items():
        assert torch.equal(value, again.named_trained()[name]), name


def test_config_is_as_transformers_writes_it() -> None:
    config = resolve_config(llama(), FACTS)
    assert config.architectures == ["LlamaForSequenceClassification"] and config.num_labels == 1
    assert config.id2label == {0: "reward"} and config.problem_type == "regression"
    assert not has_scores(resolve_config(Model(from_config=LLAMA), FACTS))


def test_what_cannot_give_scores_is_refused(causal: Path) -> None:
    with pytest.raises(SpecError, match="no class for scores .* of olmoe models"):
        built(scored(from_config={"model_type": "olmoe"} | keys_of("olmoe")))
    policy = built(scored(name_or_path=str(causal)))
    folder = causal.with_name("labels")
    policy.causal_lm.save_pretrained(folder)
    edit_json(folder / "config.json", id2label={"0": "a", "1": "b", "2": "c"})
    with pytest.raises(SpecError, match=r"gives scores of \['a', 'b', 'c'\], and the task trains those of"):
        built(scored(name_or_path=str(folder)))
    tensors = load_file(causal / "model.safetensors")
    save_file(tensors | {"classifier.weight": torch.zeros(1, 32)}, causal / "model.safetensors")
    with pytest.raises(MissingInputError, match="classifier.weight is not a tensor of the model"):
        built(scored(name_or_path=str(causal)))
    torch.save(tensors, causal / "pytorch_model.bin")
    (causal / "model.safetensors").unlink()
    with pytest.raises(MissingInputError, match="with scores is read from safetensors files"):
        built(scored(name_or_path=str(causal)))


def test_adapters_and_4_bits_leave_the_score_as_it_is() -> None:
    policy = built(scored(from_config=LLAMA, lora=Lora(rank=2)))
    trained = policy.named_trained()
    assert "score.weight" in trained and "score.lora_A.weight" not in trained
    assert all(name == "score.weight" or "lora_" in name for name in trained)
    with pytest.raises(SpecError, match="'score' names score, which is the output head"):
        built(scored(from_config=LLAMA, lora=Lora(rank=2, target_modules=("q_proj", "score"))))
    quantized = built(scored(from_config=LLAMA, lora=Lora(rank=2), quantize="nf4"))
    assert type(output_layer(quantized.causal_lm)) is ScoreHead
