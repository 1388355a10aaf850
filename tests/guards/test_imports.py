"""Imports: what is light stays light, and only dist and engine import DeepSpeed and torch.distributed."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "dsft").rglob("*.py"))
HEAVY = {"torch", "transformers", "tokenizers", "deepspeed", "numpy", "safetensors", "wandb", "datasets"}
LIGHT = ("errors", "system", "spec", "plan", "generate", "remote", "rank")
# Each takes seconds and tens of megabytes, on every rank, and training needs none of them.
NEEDLESS = {
    "transformers.trainer", "datasets", "pandas", "pyarrow", "scipy", "sklearn", "peft", "trl", "wandb",
    "matplotlib", "tensorboard", "swanlab", "liger_kernel", "torchvision", "IPython",
}  # fmt: skip


def dotted(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def test_light_modules_import_nothing_heavy() -> None:
    """In a fresh interpreter: the commands, the spec, the plan and the launch must answer fast."""
    light = [
        dotted(path) for path in MODULES if path.relative_to(ROOT / "dsft").parts[0].split(".")[0] in LIGHT
    ]
    imports = "\n".join(f"import {name}" for name in ["dsft.cli", "dsft.train", *light])
    code = f"import sys\n{imports}\nprint(*sorted({HEAVY!r} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == []
    assert len(light) > 15


def test_rank_imports_nothing_needless() -> None:
    """In a fresh interpreter: what every run imports, with a model's own class. Before that chat and export,
    which need no DeepSpeed. On a CPU, DeepSpeed does not warn that it takes it."""
    code = (
        "import sys, dsft.commands.chat, dsft.checkpoint.export\nassert 'deepspeed' not in sys.modules\n"
        "import dsft.run\nfrom transformers.models.llama.modeling_llama import LlamaForCausalLM\n"
        f"print(*sorted({NEEDLESS!r} & set(sys.modules)))"
    )
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environ.pop("DS_ACCELERATOR", None)
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environ
    )
    assert answer.returncode == 0, answer.stderr
    assert "Setting accelerator" not in answer.stdout + answer.stderr
    assert answer.stdout.split() == []


def imported(tree: ast.AST) -> set[str]:
    """Dotted names of all that a module imports, also inside functions, and of attributes of names."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update({f"{node.module}.{alias.name}" for alias in node.names}, [node.module or "."])
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names.add(f"{node.value.id}.{node.attr}")
    return names


def engine_only(names: set[str]) -> set[str]:
    return {
        name
        for name in names
        if name.split(".")[0] == "deepspeed" or f"{name}.".startswith("torch.distributed.")
    }


@pytest.mark.parametrize("source", [
    "import deepspeed.comm",
    "from torch import distributed",
    "x = torch.distributed",
    "def f():\n import deepspeed",
])  # fmt: skip
def test_search_finds_forbidden_imports(source: str) -> None:
    assert engine_only(imported(ast.parse(source)))


def test_only_dist_and_engine_import_deepspeed_and_torch_distributed() -> None:
    found = {dotted(path): engine_only(imported(ast.parse(path.read_text("utf-8")))) for path in MODULES}
    theirs = {name: names for name, names in found.items() if names}
    assert "dsft.dist.world" in theirs, "the search finds nothing"
    assert {
        name: names for name, names in theirs.items() if not name.startswith(("dsft.dist.", "dsft.engine."))
    } == {}
