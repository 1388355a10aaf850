"""What the engines train: log-probabilities equal to the model's own, stage by stage too."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsft.data.steps.batch import NO_TARGET, Tokens
from dsft.model.build import Part, build_model
from dsft.model.policy import Policy, add_noise, target_logps
from dsft.plan.cut import balanced
from dsft.spec.schema import Model
from tests.architectures.cases import small_model
from tests.make import logps_of
from tests.unit.model.test_model_init import FACTS, LLAMA


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Return two rows of 9 tokens, with holes between the targets."""
    torch.manual_seed(0)
    ids = torch.randint(0, 96, (2, 9))
    targets = ids.roll(-1, dims=1)
    targets[:, -1] = NO_TARGET
    targets[0, 3:5] = NO_TARGET
    return ids, torch.arange(9).repeat(2, 1), targets


def stages(number: int, checkpointing: bool = False) -> list[Policy]:
    model = Model(from_config=LLAMA | {"initializer_range": 0.3}, gradient_checkpointing=checkpointing)
    cut = balanced([1] * LLAMA["num_hidden_layers"], number)
    return [build_model(model, FACTS, 3, torch.float32, Part(stage, cut)) for stage in range(number)]


def through(parts: list[Policy], ids: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
    *before, last = parts
    carried = ids
    for part in before:
        carried = part(carried, Tokens(ids, positions, targets))
        assert carried.is_floating_point()
    scored = last(carried, Tokens(ids, positions, targets))
    assert scored.logps.dtype == torch.float32
    return scored.logps


def test_noise_is_uniform_within_alpha_over_the_root_of_length_and_width() -> None:
    torch.manual_seed(0)
    scale = torch.zeros(2, 400)
    scale[0, :300], scale[1, :100] = 5 / 300**0.5, 5 / 100**0.5
    noise = add_noise(torch.zeros(2, 400, 64), scale)
    for row, length in ((0, 300), (1, 100)):
        bound = 5 / (length * 64) ** 0.5
        own = noise[row, :length]
        assert bound * 0.99 < own.abs().max() <= bound
        assert own.std() == pytest.approx(bound / 3**0.5, rel=0.03)
        assert own.mean().abs() < bound * 0.02
        assert not noise[row, length:].any()


def test_noise_of_one_row_equals_transformers() -> None:
    from transformers.integrations.neftune import neftune_post_forward_hook

    embedding = torch.nn.Embedding(10, 16).train()
    embedding.neftune_noise_alpha = torch.tensor(5.0)
    ids = torch.randint(0, 10, (1, 40))
    torch.manual_seed(1)
    theirs = neftune_post_forward_hook(embedding, (ids,), embedding(ids))
    torch.manual_seed(1)
    ours = add_noise(embedding(ids), torch.full((1, 40), 5 / 40**0.5))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_noise_is_added_only_in_training() -> None:
    ids, positions, targets = batch()
    (policy,) = stages(1)
    scale = torch.full(ids.shape, 5 / 9**0.5)
    quiet = logps_of(policy, ids, positions, targets)
    assert torch.equal(logps_of(policy.eval(), ids, positions, targets, noise_scale=scale), quiet)
    policy.train()
    assert not torch.allclose(logps_of(policy, ids, positions, targets, noise_scale=scale), quiet, atol=1e-3)
    silent = logps_of(policy, ids, positions, targets, noise_scale=0 * scale)
    torch.testing.assert_close(silent, quiet, rtol=0, atol=1e-6)
    first, last = stages(2)
    torch.manual_seed(7)
    whole = logps_of(policy, ids, positions, targets, noise_scale=scale)
    torch.manual_seed(7)
    noisy = Tokens(ids, positions, targets, scale)
    torch.testing.assert_close(last(first.train()(ids, noisy), noisy).logps, whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["gemma3n_text", "gemma4_text", "gpt2", "opt"])
def test_noise_does_not_change_other_uses_of_token_ids(kind: str) -> None:
    """Noise of 0 changes nothing, where layers look tokens up a second time too."""
    policy = Policy(small_model(kind)).train()
    ids, positions, targets = batch()
    quiet = logps_of(policy, ids, positions, targets)
    silent = logps_of(policy, ids, positions, targets, noise_scale=torch.zeros(ids.shape))
    torch.testing.assert_close(silent, quiet, rtol=0, atol=1e-6)


def test_log_probabilities_by_hand() -> None:
    logits = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [5.0, 5.0, 5.0, 5.0]]])
    found = target_logps(logits.bfloat16(), torch.tensor([[2, 0, NO_TARGET]]))
    e = 2.718281828
    expected = torch.tensor([[1 / 4, e / (e + 3), 1.0]]).log()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)


def test_log_probabilities_equal_the_logits() -> None:
    ids, positions, targets = batch()
    (policy,) = stages(1)
    found = logps_of(policy, ids, positions, targets)
    logits = policy.causal_lm(input_ids=ids, use_cache=False).logits
    expected = F.log_softmax(logits, -1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    is_target = targets != NO_TARGET
    torch.testing.assert_close(found[is_target], expected[is_target])
    assert not found[~is_target].any()


@pytest.mark.parametrize("number", [2, 3, 5])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_stages_equal_the_whole_model_forward_and_backward(number: int, checkpointing: bool) -> None:
    (whole,), parts = stages(1), stages(number, checkpointing)
    expected, found = (through(p, *batch()) for p in ([whole], parts))
    assert torch.equal(found, expected)
    expected.sum().backward()
    found.sum().backward()
    gradients = {name: p.grad for part in parts for name, p in part.named_trained().items()}
    for name, p in whole.named_trained().items():
        assert torch.equal(gradients[name], p.grad), name


def test_checkpointing_recomputes_every_layer() -> None:
    calls = {True: 0, False: 0}
    for checkpointing in calls:
        (policy,) = stages(1, checkpointing)

        def count(*_: object, key: bool = checkpointing) -> None:
            calls[key] += 1

        policy.causal_lm.model.layers[2].mlp.register_forward_pre_hook(count)
        logps_of(policy.train(), *batch()).sum().backward()
    assert calls == {False: 1, True: 2}


def test_stage_holds_only_its_layers() -> None:
    first, second = stages(2)
    assert {
        name.split(".layers.")[-1].split(".")[0] for name in first.named_trained() if ".layers." in name
    } == {"0", "1"}
    assert "model.embed_tokens.weight" in first.named_trained()
    assert not {"lm_head.weight", "model.norm.weight"} & first.named_trained().keys()
    assert {"lm_head.weight", "model.norm.weight"} <= second.named_trained().keys()
    assert "model.embed_tokens.weight" not in second.named_trained()


def test_restarting_positions_are_separate_rows() -> None:
    """As packing will need: no attention across the border, given by position_ids alone."""
    ids, positions, targets = batch()
    (policy,) = stages(1)
    apart = logps_of(policy, ids, positions, targets)
    together = logps_of(policy, ids.view(1, -1), positions.view(1, -1), targets.view(1, -1))
    torch.testing.assert_close(together.view(2, 9), apart, rtol=1e-5, atol=0)
