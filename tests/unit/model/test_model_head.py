"""The head against plain log-softmax in float64: values and gradients, in chunks of any size."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from dsft.data.steps.batch import NO_TARGET
from dsft.model.head import Chunks, GradientInBackward, Head, install_head, shaping_of
from dsft.model.products import pieces
from dsft.model.softmax import Shaping, Softmax
from dsft.plan.memory import sizes
from dsft.plan.memory.sizes import BYTES_PER_LOGIT
from tests.specs import dims

HIDDEN, VOCABULARY = 12, 37
SHAPINGS = (Shaping(), Shaping(scale=0.0625), Shaping(softcap=3.0), Shaping(scale=2.5, softcap=4.0))


@pytest.fixture(autouse=True)
def never_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "PLAIN_BYTES", 0)


def make(
    shaping: Shaping = SHAPINGS[0],
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    rows_at_once: int = 4,
    **settings: Any,
) -> tuple[Head, Tensor, Tensor]:
    """Return a head whose logits spread over some units, hidden states (3, 7, HIDDEN) and targets, a third
    of them absent and those of one row all."""
    torch.manual_seed(1)
    head = Head(HIDDEN, VOCABULARY, bias, dtype=dtype)
    nn.init.normal_(head.weight)
    head.shaping, head.chunk_bytes = shaping, rows_at_once * VOCABULARY * BYTES_PER_LOGIT
    for name, value in settings.items():
        setattr(head, name, value)
    hidden = torch.randn(3, 7, HIDDEN).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (3, 7))
    targets[torch.rand(3, 7) < 0.3] = NO_TARGET
    targets[1] = NO_TARGET
    return head, hidden, targets


def reference(
    head: Head, hidden: Tensor, targets: Tensor, smoothing: float = 0.0
) -> tuple[Tensor, list[Tensor]]:
    """float64 log-probabilities, and leaves (hidden, weight, bias if there is one) to differentiate by."""
    leaves = [t.detach().double().requires_grad_() for t in (hidden, *head.parameters())]
    logits = F.linear(*leaves) * head.shaping.scale
    if head.shaping.softcap:
        logits = head.shaping.softcap * torch.tanh(logits / head.shaping.softcap)
    losses = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="none",
        label_smoothing=smoothing,
    )  # fmt: skip
    return -losses.view_as(targets), leaves


def gradients(head: Head, hidden: Tensor) -> list[Tensor]:
    found = [hidden.grad, *(p.grad for p in head.parameters())]
    assert all(gradient is not None for gradient in found)
    return [gradient for gradient in found if gradient is not None]


def assert_near(found: Tensor, expected: Tensor, bound: float) -> None:
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error <= bound, float(error)


def assert_equal_gradients(head: Head, hidden: Tensor, leaves: list[Tensor], bound: float) -> None:
    for gradient, leaf in zip(gradients(head, hidden), leaves, strict=True):
        assert gradient.dtype == hidden.dtype and leaf.grad is not None
        assert_near(gradient, leaf.grad, bound)


@pytest.mark.parametrize("shaping", SHAPINGS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_head_values_and_gradients(shaping: Shaping, bias: bool, uniform: bool, smoothing: float) -> None:
    head, hidden, targets = make(shaping, bias, uniform=uniform, label_smoothing=smoothing)
    upstream = torch.full(targets.shape, 0.7) if uniform else torch.randn(targets.shape)
    found = head(hidden, targets)
    found.backward(upstream)
    expected, leaves = reference(head, hidden, targets, smoothing)
    expected.backward(upstream.double())
    assert found.dtype == torch.float32
    assert_near(found, expected, 1e-6)
    assert not found[targets == NO_TARGET].any()
    assert_equal_gradients(head, hidden, leaves, 1e-6)


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("rows_at_once", [1, 5, 9, 10, 1000])
def test_any_chunk_size_gives_the_same(uniform: bool, rows_at_once: int) -> None:
    head, hidden, targets = make(Shaping(softcap=5.0), True, rows_at_once=rows_at_once, uniform=uniform)
    (-head(hidden, targets).sum()).backward()
    expected, leaves = reference(head, hidden, targets)
    (-expected.sum()).backward()
    assert_equal_gradients(head, hidden, leaves, 1e-6)


@pytest.mark.parametrize("uniform", [False, True])
def test_logits_of_all_tokens_are_never_allocated(uniform: bool) -> None:
    """What is kept for the backward is counted by its own, narrower type."""
    head, hidden, targets = make(rows_at_once=4, uniform=uniform)
    sizes: list[int] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and VOCABULARY in result.shape and HIDDEN not in result.shape:
                sizes.append(result.nbytes if "new_empty" in str(function) else result.nbytes * 2)
            return result

    with Watch():
        head(hidden, targets).sum().backward()
    assert 4 * VOCABULARY * BYTES_PER_LOGIT < (targets != NO_TARGET).sum() * VOCABULARY * 4
    assert sizes and max(sizes) <= 4 * VOCABULARY * BYTES_PER_LOGIT


@pytest.mark.parametrize("bias", [False, True])
def test_frozen_head_computes_logits_once(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    """Under any upstream gradient."""
    head, hidden, targets = make(SHAPINGS[3], bias)
    head.requires_grad_(False)
    monkeypatch.setattr(GradientInBackward, "apply", None)  # not taken
    upstream = torch.randn(targets.shape)
    head(hidden, targets).backward(upstream)
    expected, leaves = reference(head, hidden, targets)
    expected.backward(upstream.double())
    assert hidden.grad is not None and leaves[0].grad is not None
    assert_near(hidden.grad, leaves[0].grad, 1e-6)


@pytest.mark.parametrize("rows_at_once", [1, 3, 1000])
def test_bf16_head_under_any_gradient(rows_at_once: int) -> None:
    """None, some and all of the rows kept: as near to float64 as a single product is, by the tensor."""
    head, hidden, targets = make(dtype=torch.bfloat16, rows_at_once=rows_at_once)
    upstream = torch.randn(targets.shape)
    head(hidden, targets).backward(upstream)
    whole, leaves = reference(head, hidden, targets)
    whole.backward(upstream.double())
    assert_equal_gradients(head, hidden, leaves, 2e-2)


def test_float16_stores_only_scaled_gradients() -> None:
    weight = torch.empty(VOCABULARY, HIDDEN, dtype=torch.float16)
    chunks = Chunks(Softmax(), 1 << 20)
    assert chunks.stored_rows(weight, weight) == 0 < chunks.stored_rows(weight.float(), weight.float())


def test_second_order_is_checked_in_float64() -> None:
    """torch's own numerical differentiation, of every input at once."""
    head, hidden, targets = make(Shaping(scale=0.5, softcap=4.0), True, torch.float64)
    rows = (targets.flatten() != NO_TARGET).nonzero().squeeze(1)
    chunks = Chunks(Softmax(head.shaping, 0.1), head.chunk_bytes or 0)
    inputs = (hidden.detach().flatten(0, 1)[rows].requires_grad_(), head.weight, head.bias)
    assert torch.autograd.gradcheck(
        lambda h, w, b: GradientInBackward.apply(h, b, w, targets.flatten()[rows], chunks), inputs
    )


@pytest.mark.parametrize("uniform", [False, True])
def test_bf16_has_statistics_in_float32(uniform: bool) -> None:
    head, hidden, targets = make(dtype=torch.bfloat16, uniform=uniform, rows_at_once=2)
    found = head(hidden, targets)
    (found.sum() * 0.5).backward()
    product = F.linear(hidden.detach(), head.weight.detach())  # rounded to bf16, as the model's own
    expected = product.double().log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    is_target = targets != NO_TARGET
    assert found.dtype == torch.float32
    assert_near(found[is_target], expected[is_target], 1e-6)
    whole, leaves = reference(head, hidden, targets)
    (whole.sum() * 0.5).backward()
    assert_equal_gradients(head, hidden, leaves, 2e-2)


def test_bf16_weight_gradient_accumulates_in_float32() -> None:
    """As near to that in float64 in 64 chunks as in one."""
    hidden, targets = torch.randn(1, 4096, HIDDEN).bfloat16(), torch.randint(0, VOCABULARY, (1, 4096))

    def error(rows_at_once: int) -> float:
        head = make(dtype=torch.bfloat16, uniform=True, rows_at_once=rows_at_once)[0]
        head(hidden, targets).sum().backward()
        whole, (_, weight) = reference(head, hidden, targets)
        whole.sum().backward()
        assert head.weight.grad is not None and weight.grad is not None
        return float((head.weight.grad - weight.grad).norm() / weight.grad.norm())

    assert error(64) < 1.3 * error(4096)


@pytest.mark.parametrize("linear", [F.linear, zero3_linear_wrap])
def test_gradient_order_does_not_depend_on_targets(linear: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed adds them up over ranks in that order; its ZeRO 3 replaces F.linear."""
    monkeypatch.setattr(F, "linear", linear)
    orders = list[list[str]]()
    for rows_at_once, uniform in itertools.product((0, 4, 1000), (False, True)):
        head, hidden, targets = make(bias=True, rows_at_once=max(1, rows_at_once), uniform=uniform)
        orders.append([])
        for name, parameter in head.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: orders[-1].append(name))
        head(hidden * 1, targets if rows_at_once else torch.full_like(targets, NO_TARGET)).sum().backward()
    assert orders == [["bias", "weight"]] * 6


@pytest.mark.parametrize("uniform", [False, True])
def test_head_without_targets(uniform: bool) -> None:
    head, hidden, targets = make(bias=True, uniform=uniform)
    found = head(hidden, torch.full_like(targets, NO_TARGET))
    found.sum().backward()
    assert not found.any()
    assert not any(gradient.any() for gradient in gradients(head, hidden))


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("frozen", [("weight",), ("weight", "bias"), ("hidden",)])
def test_frozen_parts_get_no_gradient(uniform: bool, frozen: tuple[str, ...]) -> None:
    head, hidden, targets = make(bias=True, uniform=uniform)
    tensors = {"hidden": hidden, "weight": head.weight, "bias": head.bias}
    for name in frozen:
        tensors[name].requires_grad_(False)
    head(hidden, targets).sum().backward()
    expected, leaves = reference(head, hidden, targets)
    expected.sum().backward()
    for (name, tensor), leaf in zip(tensors.items(), leaves, strict=True):
        assert (tensor.grad is None) == (name in frozen)
        if tensor.grad is not None and leaf.grad is not None:
            assert_near(tensor.grad, leaf.grad, 1e-6)


@pytest.mark.parametrize("uniform", [False, True])
def test_a_tied_weight_gets_both_gradients(uniform: bool) -> None:
    head, _, targets = make(uniform=uniform)
    nn.init.normal_(head.weight, std=0.3)
    embedding = nn.Embedding(VOCABULARY, HIDDEN)
    embedding.weight = head.weight
    ids = torch.randint(0, VOCABULARY, targets.shape)
    head(embedding(ids), targets).sum().backward()
    weight = head.weight.detach().double().requires_grad_()
    logits = F.linear(F.embedding(ids, weight), weight)
    (
        -F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="sum")
    ).backward()
    assert head.weight.grad is not None and weight.grad is not None
    assert_near(head.weight.grad, weight.grad, 1e-6)


def test_second_backward_is_refused() -> None:
    head, hidden, targets = make(uniform=True)
    loss = head(hidden, targets).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward for each forward"):
        loss.backward()


def test_a_known_number_of_targets_changes_nothing() -> None:
    head, hidden, targets = make()
    assert torch.equal(head(hidden, targets, int((targets != NO_TARGET).sum())), head(hidden, targets))


def test_evaluation_is_not_smoothed() -> None:
    head, hidden, targets = make(label_smoothing=0.3)
    head.eval()
    assert_near(head(hidden, targets), reference(head, hidden, targets)[0], 1e-6)


def test_head_without_gradients_gives_the_same() -> None:
    head, hidden, targets = make(SHAPINGS[3], bias=True, label_smoothing=0.1)
    expected = head(hidden, targets)
    with torch.no_grad():
        assert torch.equal(head(hidden, targets), expected)


def test_few_targets_without_a_bias_are_not_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden, targets = make(SHAPINGS[3], label_smoothing=0.1)
    expected = head(hidden, targets)
    monkeypatch.setattr(sizes, "PLAIN_BYTES", 1 << 24)
    head.chunk_bytes = None
    monkeypatch.setattr(GradientInBackward, "apply", None)  # not taken
    torch.testing.assert_close(head(hidden, targets), expected)


@pytest.mark.parametrize(
    ("rows", "width", "limit"), list(itertools.product((0, 1, 7, 100), (1, 50), (1, 400, 10**6)))
)
def test_chunks_cover_all_tokens_evenly(rows: int, width: int, limit: int) -> None:
    found = list(pieces(rows, width, limit))
    assert [i for piece in found for i in range(piece.start, piece.stop)] == list(range(rows))
    sizes = [piece.stop - piece.start for piece in found]
    assert all(size == 1 or size * width * BYTES_PER_LOGIT <= limit for size in sizes)
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


# --- in a model -------------------------------------------------------------------------------------------

SMALL = dims(16, 24, 2, 2, 1, head_dim=8, vocab_size=48, pad_token_id=0)
SMALL |= {"max_position_embeddings": 32, "initializer_range": 0.3}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"final_logit_softcapping": 2.0},
    "gemma3_text": {"final_logit_softcapping": 2.0},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
    "hyperclovax": {"logits_scaling": 3.0},
    "phi": {},
    "gpt_neox": {},
    "starcoder2": {},
    "recurrent_gemma": {"logits_soft_cap": 2.0, "num_hidden_layers": 3, "lru_width": 16},
}


@pytest.mark.parametrize("kind", MODELS)
def test_model_with_own_logits(kind: str) -> None:
    """The head must follow what comes after the output layer, and leave the model's logits and names."""
    config = AutoConfig.for_model(kind, **(SMALL | MODELS[kind]))
    torch.manual_seed(0)
    causal_lm = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in causal_lm.parameters():
            parameter.normal_(std=0.3)
    names, ids = list(causal_lm.state_dict()), torch.randint(1, 48, (2, 9))
    logits = causal_lm(input_ids=ids, use_cache=False).logits
    head = install_head(causal_lm)
    assert head is not None and list(causal_lm.state_dict()) == names
    assert torch.equal(causal_lm(input_ids=ids, use_cache=False).logits, logits)
    hidden = causal_lm.base_model(input_ids=ids, use_cache=False).last_hidden_state
    targets = ids.roll(-1, 1)
    expected = logits.double().log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    torch.testing.assert_close(head(hidden, targets).double(), expected, atol=2e-6, rtol=1e-6)
    if MODELS[kind]:
        assert shaping_of(causal_lm) != Shaping()


def test_other_output_layers_are_kept() -> None:
    causal_lm = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL))
    causal_lm.lm_head = nn.Sequential(causal_lm.lm_head)
    assert install_head(causal_lm) is None
    assert type(causal_lm.lm_head) is nn.Sequential
