"""Model types and names of modules, looked up in transformers' sources without importing it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dsft.errors import SpecError
from dsft.spec.architecture import PIPELINE_MODEL_TYPES
from dsft.spec.load import load_spec
from dsft.spec.model_types import model_types, source_of
from tests.unit.spec.conftest import Write

LLAMA = "{{from_config: {{model_type: {}}}, lora: {{rank: 8, target_modules: [{}]}}}}"


def test_table_has_the_model_types_of_transformers() -> None:
    from transformers import CONFIG_MAPPING

    assert set(model_types()) == set(CONFIG_MAPPING)
    without = {"internlm3", "iquestcoder"}  # they have Llama's modules
    assert not {kind for kind in PIPELINE_MODEL_TYPES if not source_of(kind)} - without


@pytest.mark.parametrize(("kind", "modules", "message"), [
    ("lama", "q_proj",
     "from_config.model_type: 'lama' is not a model type of transformers; did you mean llama?"),
    ("llama", "q_proj, c_attn",
     "'c_attn' is not a module of a llama model; write one that is, such as gate_proj"),
    ("gpt2", "model.layers.3.q_proj", "'model.layers.3.q_proj' is not a module of a gpt2 model"),
])  # fmt: skip
def test_what_transformers_does_not_have_is_a_mistake(
    write: Write, kind: str, modules: str, message: str
) -> None:
    path = write(model=LLAMA.format(kind, modules))
    with pytest.raises(SpecError) as raised:
        load_spec(path)
    assert message in str(raised.value) and len(raised.value.problems) == 1


MODULES = {
    "llama": "q_proj, lm_head", "gpt2": "c_attn", "qwen3_moe": "gate", "gemma3_text": "layers.0.up_proj",
}  # fmt: skip


@pytest.mark.parametrize(("kind", "modules"), MODULES.items(), ids=MODULES)
def test_modules_that_are_there_pass(write: Write, kind: str, modules: str) -> None:
    assert load_spec(write(model=LLAMA.format(kind, modules)))


def test_config_json_is_looked_at_too(write: Write, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    (tmp_path / "model/tokenizer.json").write_text("{}")
    write(model="{name_or_path: model, lora: {rank: 8, target_modules: [c_attn]}}")
    with pytest.raises(SpecError, match="'c_attn' is not a module of a gemma3 model"):
        load_spec("spec.yaml")
    (tmp_path / "model/config.json").write_text(json.dumps({"model_type": "lama"}))
    with pytest.raises(SpecError, match="model.name_or_path: 'lama' is not a model type"):
        load_spec("spec.yaml")


def test_layers_and_experts_without_number_are_refused(write: Write) -> None:
    """Building them would take hours, or all memory."""
    path = write(model="{from_config: {model_type: llama, num_hidden_layers: 9223372036854775808}}")
    with pytest.raises(
        SpecError, match=r"num_hidden_layers is 9223372036854775808, and no model has more than 20,000"
    ):
        load_spec(path)
    path = write(model="{from_config: {model_type: gemma3, text_config: {num_local_experts: 20001}}}")
    with pytest.raises(SpecError, match="num_local_experts is 20001, and no model has more"):
        load_spec(path)
    sizes = "shared_expert_intermediate_size: 20480, vocab_size_per_layer_input: 262144"
    load_spec(write(model=f"{{from_config: {{model_type: gemma3, {sizes}}}}}"))


def test_transformers_is_not_imported(write: Write) -> None:
    path = write(model=LLAMA.format("llama", "q_proj"))
    code = f"import sys; from dsft.spec.load import load_spec; load_spec({str(path)!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"transformers", "torch", "numpy"} & set(done.stdout.split())
