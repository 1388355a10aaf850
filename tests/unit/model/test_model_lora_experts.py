"""Adapters in mixtures of experts: which layers get one, what peft loads, and what a merged model is."""

from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from dsft.checkpoint.files import write_json
from dsft.checkpoint.merge import Adapter, WholeModel
from dsft.checkpoint.read import CheckpointReader
from dsft.engine.api import StateKind
from dsft.errors import SpecError
from dsft.model.build import build_model
from dsft.model.config import on_meta
from dsft.model.experts import left_out
from dsft.model.lora import CONFIG, WEIGHTS, own_names
from dsft.model.policy import Policy
from dsft.spec.schema import Lora, Model
from tests.selected import tiered
from tests.specs import dims
from tests.unit.model.test_model_init import FACTS

pytestmark = pytest.mark.filterwarnings("ignore")

SHAPE = dims(16, 24, 2, 2, 2, vocab_size=FACTS.vocab_size, max_position_embeddings=64)
SHAPE |= {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}
GROUPS = {
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 8},
    "olmoe": {"num_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},
    "deepseek_v3": LATENT | GROUPS,
}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
IDS = torch.arange(3, 23)[None]


def config_of(kind: str) -> dict[str, Any]:
    names = vars(CONFIG_MAPPING[kind]())
    known = {key: value for key, value in SHAPE.items() if key in names or key == "num_experts_per_tok"}
    return {"model_type": kind, **known, **KINDS[kind]}


def model_of(kind: str, **lora: Any) -> Model:
    return Model(from_config=config_of(kind), lora=Lora(rank=2, alpha=4, **lora))


def policy_of(model: Model) -> Policy:
    made = build_model(model, FACTS, 3, torch.float32)
    made.causal_lm.eval()
    return made


class Saved:
    """A checkpoint of adapters, in memory."""

    def __init__(self, model: Model, values: dict[str, Tensor]) -> None:
        self.state = {"spec": {"model": model.model_dump(mode="json"), "train": {"seed": 3}}}
        self.shapes = {name: tuple(value.shape) for name, value in values.items()}
        self._values = values

    def read(self, name: str, kind: StateKind, start: int, stop: int) -> Tensor:
        return self._values[name].flatten()[start:stop]


def trained(model: Model) -> tuple[Policy, CheckpointReader]:
    """Return a model whose adapters have values, and its checkpoint."""
    made = policy_of(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in made.named_trained().values():
            parameter.add_(0.3 * torch.randn_like(parameter))
    values = {name: p.detach().clone() for name, p in made.named_trained().items()}
    return made, cast(CheckpointReader, Saved(model, values))


def logits(causal_lm: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = causal_lm(IDS).logits
    return found


def plain(kind: str) -> PreTrainedModel:
    """Return the model without adapters, of transformers' own class."""
    base = policy_of(Model(from_config=config_of(kind))).causal_lm
    made: PreTrainedModel = AutoModelForCausalLM.from_config(base.config).eval()
    made.load_state_dict(base.state_dict())
    return made


def write_adapter(folder: Path, model: Model, checkpoint: CheckpointReader) -> bool:
    """As an export does. Returns whether peft's own loader would misread it."""
    base = policy_of(model.model_copy(update={"lora": None})).causal_lm
    adapter = Adapter(checkpoint, on_meta(base.config), torch.float32)
    write_json(folder / CONFIG, adapter.config | {"base_model_name_or_path": "x"})
    tensors = {
        name: adapter.read(name, "value", 0, torch.Size(shape).numel()).view(shape).clone()
        for name, shape in adapter.shapes.items()
    }
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return adapter.is_misread


@pytest.mark.parametrize(("kind", "layers"), [
    ("qwen3_moe", ATTENTION),
    ("mixtral", ATTENTION),
    ("olmoe", ATTENTION),
    ("gpt_oss", ATTENTION),
    ("qwen2_moe", ATTENTION | MLP | {"shared_expert_gate"}),
    ("deepseek_v3", MLP | {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}),
])  # fmt: skip
def test_all_linear_covers_attention_dense_layers_and_shared_experts(kind: str, layers: set[str]) -> None:
    made = policy_of(model_of(kind))
    names = [name for name in made.named_trained() if name.endswith("lora_A.weight")]
    assert {name.split(".")[-3] for name in names} == layers
    assert not any(".experts." in name or name.endswith((".gate.lora_A.weight",)) for name in names)
    assert "the routed experts get none" in next(left_out(made.causal_lm))


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_the_adapter_or_is_known_to_misread_it(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    made, checkpoint = trained(model)
    expected, base = logits(made.causal_lm), logits(plain(kind))
    is_misread = write_adapter(tmp_path, model, checkpoint)
    assert is_misread == (kind == "deepseek_v3")
    with own_names():
        ours = PeftModel.from_pretrained(plain(kind), str(tmp_path))
    torch.testing.assert_close(logits(ours), expected, rtol=0, atol=1e-6)
    theirs = logits(PeftModel.from_pretrained(plain(kind), str(tmp_path)))
    assert bool((theirs - expected).abs().max() <= 1e-6) != is_misread
    assert (expected - base).abs().max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_merged_model_equals_base_plus_adapter(kind: str) -> None:
    made, checkpoint = trained(model_of(kind))
    base = plain(kind)
    whole = WholeModel(checkpoint, on_meta(base.config), torch.float32)
    merged = {name: whole.tensor(name).clone() for name, _ in base.named_parameters()}
    adapted = {name.replace(".lora_A", "") for name in made.named_trained() if ".lora_A" in name}
    first = dict(base.named_parameters())
    assert {name for name, value in merged.items() if not torch.equal(value, first[name])} == adapted
    base.load_state_dict(base.state_dict() | merged)
    torch.testing.assert_close(logits(base), logits(made.causal_lm), rtol=0, atol=2e-6)


def test_router_can_be_trained_in_full(tmp_path: Path) -> None:
    model = model_of("qwen3_moe", modules_to_save=("mlp.gate",))
    made, checkpoint = trained(model)
    assert "model.layers.1.mlp.gate.weight" in made.named_trained()
    assert not write_adapter(tmp_path, model, checkpoint)
    loaded = PeftModel.from_pretrained(plain("qwen3_moe"), str(tmp_path))
    torch.testing.assert_close(logits(loaded), logits(made.causal_lm), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "lora", "message"), [
    ("qwen3_moe", {"target_modules": ("gate_proj",)},
     "'gate_proj' is a name that routed experts have in files"),
    ("mixtral", {"target_modules": ("w1", "q_proj")}, "'w1' is a name that routed experts have in files"),
    ("gpt_oss", {"target_modules": ("experts",)}, "of class GptOssExperts, for which adapters are not"),
    ("mixtral", {"target_modules": ("experts",), "dropout": 0.1},
     "and adapters of experts cannot have dropout"),
    ("mixtral", {"target_modules": ("experts",), "use_dora": True},
     "and adapters of experts cannot have use_dora"),
    ("qwen3_moe", {"target_modules": ("gate",)}, "of class Qwen3MoeTopKRouter and no linear layer"),
    ("qwen3_moe", {"modules_to_save": ("experts",)}, "which are not trained beside adapters; train them"),
    ("qwen3_moe", {"target_modules": ("q_prj",)}, "'q_prj' matches no name here"),
])  # fmt: skip
def test_names_that_mean_no_layer_are_refused(kind: str, lora: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        policy_of(model_of(kind, **lora))
    assert message in str(caught.value)


def test_shared_experts_can_be_named() -> None:
    made = policy_of(model_of("deepseek_v3", target_modules=("shared_experts.up_proj",)))
    assert {name.rpartition(".lora_")[0] for name in made.named_trained()} == {
        "model.layers.1.mlp.shared_experts.up_proj"
    }


@pytest.mark.parametrize(("kind", "names", "adapted"), [
    ("qwen3_moe", ("down_proj",), {"down_proj": [2]}),
    ("qwen3_moe", ("experts", "q_proj"), {"down_proj": [2], "gate_up_proj": [2], "q_proj": []}),
    ("deepseek_v3", ("down_proj",), {"down_proj": []}),
    ("deepseek_v3", ("experts.down_proj",), {"down_proj": [2]}),
])  # fmt: skip
def test_names_mean_linear_layers_and_experts_where_only_these_have_them(
    kind: str, names: tuple[str, ...], adapted: dict[str, list[int]]
) -> None:
    """adapted: layer or weight -> the rank's place in A's shape with experts before it."""
    made = policy_of(model_of(kind, target_modules=names))
    found = {
        name.split(".")[-3]: list(p.shape[1:-1]) for name, p in made.named_trained().items() if "A" in name
    }
    assert found == adapted
    assert bool(list(left_out(made.causal_lm))) == (not any(adapted.values()))


IN_EXPERTS = [
    ("experts",),
    ("experts.gate_up_proj", "o_proj"),
    ("experts.down_proj",),
    ("1.mlp.experts", "o_proj"),
]


OLD = tuple(map(int, version("peft").split(".")[:2])) < (0, 20)


@pytest.mark.skipif(OLD, reason="the matrices of peft 0.18 and 0.19 have other shapes")
@pytest.mark.parametrize("targets", IN_EXPERTS)
@pytest.mark.parametrize("kind", tiered(sorted(KINDS.keys() - {"gpt_oss"}), ("qwen3_moe", "deepseek_v3")))
def test_adapters_of_experts_are_pefts(kind: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    """Read by peft, read again to train further, and merged."""
    model = model_of(kind, target_modules=targets)
    made, checkpoint = trained(model)
    expected, base = logits(made.causal_lm), plain(kind)
    assert (expected - logits(base)).abs().max() > 1e-2
    assert not write_adapter(tmp_path, model, checkpoint)
    theirs = PeftModel.from_pretrained(plain(kind), str(tmp_path))
    torch.testing.assert_close(logits(theirs), expected, rtol=0, atol=3e-6)
    again = policy_of(model_of(kind, target_modules=targets, path=str(tmp_path)))
    assert torch.equal(logits(again.causal_lm), expected)
    whole = WholeModel(checkpoint, on_meta(base.config), torch.float32)
    merged = {name: whole.tensor(name).clone() for name, _ in base.named_parameters()}
    base.load_state_dict(base.state_dict() | merged)
    torch.testing.assert_close(logits(base), expected, rtol=0, atol=3e-6)


def test_the_factors_of_experts_are_drawn_as_in_peft() -> None:
    """A uniform within ±1/√in, other values for each weight and layer, the same in every build; B zero."""
    first, second = (policy_of(model_of("qwen3_moe", target_modules=("experts",))) for _ in range(2))
    values = {name: p.detach() for name, p in first.named_trained().items()}
    assert all(torch.equal(values[name], p) for name, p in second.named_trained().items())
    of_a = {name: value for name, value in values.items() if "lora_A" in name}
    for name, value in of_a.items():
        bound = value.shape[-1] ** -0.5
        assert 0.8 * bound < value.abs().max() <= bound, name
    assert len({float(value.flatten()[0]) for value in of_a.values()}) == len(of_a) == 4
    assert not any(value.any() for name, value in values.items() if name not in of_a)
