import json
from pathlib import Path

import pytest

from dsft.errors import MissingInputError, SpecError
from dsft.plan import census as module
from dsft.plan.census import Census, census
from dsft.plan.cut import Cut
from dsft.spec.schema import Lora, Model

pytest.importorskip("transformers")

from dsft.model.census import take_census  # noqa: E402 - needs transformers

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip


def numel_by_hand(vocabulary: int) -> int:
    attention = 64 * 64 * 2 + 64 * 32 * 2
    return 2 * vocabulary * 64 + 3 * (attention + 3 * 64 * 128 + 2 * 64) + 64


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Census:
    return census(Model(from_config=LLAMA), tmp_path_factory.mktemp("cache"))


def test_the_parameters_are_those_of_the_class_with_the_byte_levels_vocabulary(llama: Census) -> None:
    assert (llama.architecture, llama.num_layers) == ("LlamaForCausalLM", 3)
    assert llama.numel == numel_by_hand(259)
    assert llama.parameters[0].name == "model.embed_tokens.weight" and llama.parameters[0].embedding


def test_stages_share_the_parameters_as_the_engine_cuts_them(llama: Census) -> None:
    first, last = (llama.stage(stage, Cut((1, 2))) for stage in (0, 1))
    assert sorted(p.name for p in (*first, *last)) == sorted(p.name for p in llama.parameters)
    assert {p.layer for p in first} == {None, 0} and {p.layer for p in last} == {None, 1, 2}
    assert [p.name for p in first if p.layer is None] == ["model.embed_tokens.weight"]
    assert [p.name for p in last if p.layer is None] == ["model.norm.weight", "lm_head.weight"]


def test_what_is_trained_is_counted_with_adapters_and_by_patterns() -> None:
    lora = Lora(rank=2, target_modules=("q_proj", "up_proj"), use_dora=True)
    adapted = module.census_from(take_census(Model(from_config=LLAMA, lora=lora)))
    adapters = 3 * (2 * (64 + 64) + 64 + 2 * (64 + 128) + 128)  # A, B and magnitude of each of 3 layers
    assert (adapted.trained, adapted.numel) == (adapters, numel_by_hand(259) + adapters)
    assert {p.layer for p in adapted.parameters if p.trained} == {0, 1, 2}
    norms = module.census_from(take_census(Model(from_config=LLAMA, trainable=("*norm.weight",))))
    assert (norms.trained, norms.numel) == (7 * 64, numel_by_hand(259))


def test_a_tied_tensor_counts_once() -> None:
    tied = module.census_from(take_census(Model(from_config={**LLAMA, "tie_word_embeddings": True})))
    assert tied.numel == numel_by_hand(259) - 259 * 64
    assert tied.parameters[0].aliases == ("lm_head.weight",)


def test_answers_are_kept_and_refusals_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match=r"model.from_config.hiden_size: .* did you mean hidden_size\?"):
        census(Model(from_config={**LLAMA, "hiden_size": 1}), tmp_path)
    assert not list(tmp_path.rglob("*.json"))
    answer = take_census(Model(from_config=LLAMA))
    monkeypatch.setattr(module, "_count", lambda *_: answer)
    first = census(Model(from_config=LLAMA), tmp_path)
    monkeypatch.setattr(module, "_count", lambda *_: pytest.fail("asked again"))
    assert census(Model(from_config=LLAMA), tmp_path) == first


def test_models_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError):
        take_census(Model(name_or_path=str(tmp_path / "absent")))


def test_a_config_in_a_folder_is_counted_again_when_it_changes(tmp_path: Path) -> None:
    def digest(layers: int) -> str:
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": layers}))
        return module._digest(Model(name_or_path=str(tmp_path)))

    assert digest(3) == digest(3) != digest(4)
