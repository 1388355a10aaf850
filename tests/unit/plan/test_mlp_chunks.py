"""In how many chunks of tokens MLPs are computed, and what the plan counts of them."""

from typing import Any

import pytest

from dsft.plan.census import Census, Parameter
from dsft.plan.memory.gathered import gathered
from dsft.plan.memory.layer import mlp_chunks
from dsft.plan.memory.ranks import RankMemory, stage_memory
from dsft.spec.layout import Layout
from dsft.spec.schema import Spec
from tests.specs import minimal_spec

HIDDEN, INNER = 4096, 14336  # as in Llama 3.1 8B
MLP = "model.layers.0.mlp"


def census(mlp: str | None = MLP) -> Census:
    def one(name: str, rows: int, columns: int, mlp: str | None = None) -> Parameter:
        return Parameter(f"model.layers.0.{name}.weight", (rows, columns), 0, False, (), mlp=mlp)

    parameters = (
        Parameter("model.embed_tokens.weight", (1000, HIDDEN), None, True, ()),
        *(one(f"self_attn.{name}_proj", HIDDEN, HIDDEN) for name in "qkvo"),
        *(one(f"mlp.{name}_proj", INNER, HIDDEN, mlp) for name in ("gate", "up")),
        one("mlp.down_proj", HIDDEN, INNER, mlp),
    )
    return Census("LlamaForCausalLM", 1, None, parameters)


def spec(zero: int = 1, **model: Any) -> Spec:
    keys = {"from_config": {"model_type": "llama"}, "gradient_checkpointing": True, **model}
    return minimal_spec(model=keys, parallel={"zero_stage": zero})


def planned(tokens: int, zero: int = 1, mlp: str | None = MLP, **model: Any) -> RankMemory:
    return stage_memory(0, census(mlp), spec(zero, **model), Layout(2, 1), tokens)


def test_by_itself_a_chunk_takes_a_gibibyte_at_most() -> None:
    inside = (
        3 * HIDDEN + 4 * INNER
    ) * 2  # bytes of a token in bf16: of each matrix in and out, and once more
    for tokens in (1, 2**30 // inside, 2**30 // inside + 1, 32_768, 131_072):
        chunks = mlp_chunks(spec(), census(), tokens)
        assert -(-tokens // chunks) * inside <= 2**30 + inside
        assert chunks == 1 or -(-tokens // (chunks - 1)) * inside > 2**30
    assert mlp_chunks(spec(), census(), 1000) == 1


@pytest.mark.parametrize("model", [{"gradient_checkpointing": False}, {"compile": True}, {"mlp_chunks": 1}])
def test_none_where_they_are_switched_off_or_not_possible(model: dict[str, Any]) -> None:
    assert mlp_chunks(spec(**model), census(), 131_072) == 1
    assert mlp_chunks(spec(), census(mlp=None), 131_072) == 1


def test_the_plan_counts_one_chunk() -> None:
    whole, cut = planned(131_072, mlp_chunks=1), planned(131_072, mlp_chunks=64)
    assert planned(131_072, mlp_chunks=100_000).activations < cut.activations < whole.activations / 2
    assert planned(131_072).activations < whole.activations / 2  # by itself
    assert planned(1000) == planned(1000, mlp_chunks=1)


def test_zero_3_gathers_the_mlp_as_one_module() -> None:
    """Its three weights arrive together, and are copied from the buffer."""
    apart, together = (
        gathered(census().parameters, spec(3), 1000, frozenset(leaves), 0).arriving for leaves in ((), (MLP,))
    )
    assert together.total == 2 * 2 * 3 * INNER * HIDDEN > apart.total


@pytest.mark.parametrize(("freed", "backward"), [(0, (19, 1)), (2**28, (18, 0))])
def test_the_backward_gathers_the_embeddings_when_it_has_freed_layers(
    freed: int, backward: tuple[int, int]
) -> None:
    """30 layers of one matrix, embeddings and an output layer, up to 10⁹ elements and what is gathered
    ahead: in matrices and embeddings. freed: bytes of activations for each layer."""
    matrix, words = INNER * HIDDEN, 128_000 * HIDDEN
    names = [f"model.layers.{number}.mlp" for number in range(30)]
    parameters = (
        Parameter("model.embed_tokens.weight", (128_000, HIDDEN), None, True, ()),
        *(
            Parameter(f"{name}.up.weight", (INNER, HIDDEN), n, False, (), mlp=name)
            for n, name in enumerate(names)
        ),
        Parameter("lm_head.weight", (128_000, HIDDEN), None, False, ()),
    )
    found = gathered(parameters, spec(3), 10**8, frozenset(), 30 * freed)
    counted = {
        "arriving": (19, 1), "in_forward": (19, 1), "mlps": (18, 1), "others": (19, 1), "head": (9, 1),
        "backward": backward, "kept": (9, 1),
    }  # fmt: skip
    for name, (matrices, outside) in counted.items():
        assert getattr(found, name).total == 2 * (matrices * matrix + outside * words), name
