"""No code that comes with a model, a tokenizer or a data set is run: every call that could passes
trust_remote_code=False."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "dsft").rglob("*.py"))
WITHOUT_CODE = {"GenerationConfig", "PeftModel"}
"""Classes whose from_pretrained runs no code of a folder and has no trust_remote_code."""


def untold(tree: ast.AST) -> Iterator[str]:
    """Where from_pretrained or from_config of a class is used in any other way than in a call with
    trust_remote_code=False."""
    safe = {
        id(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "trust_remote_code"
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value is False
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or id(node) in safe:
            continue
        owner = ast.unparse(node.value)
        is_reader = node.attr == "from_pretrained" and owner not in WITHOUT_CODE
        is_maker = node.attr == "from_config" and owner.split(".")[-1].startswith("Auto")
        if is_reader or is_maker:
            yield f"line {node.lineno}: {ast.unparse(node)}"
        elif node.attr in {"trust_remote_code", "allow_all_kernels", "use_kernels"}:
            yield f"line {node.lineno}: {ast.unparse(node)}"


def given_true(tree: ast.AST) -> Iterator[str]:
    """Where a call is given code to trust, or kernels of the hub."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in {
            "allow_all_kernels",
            "use_kernels",
            "kernel_config",
        }:
            yield f"line {node.value.lineno}: {node.arg}"
        elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                yield f"line {node.value.lineno}: {node.arg}"


def test_every_call_sets_trust_remote_code_false() -> None:
    found = []
    calls = 0
    for path in MODULES:
        source = path.read_text(encoding="utf-8")
        calls += source.count("trust_remote_code=False")
        tree = ast.parse(source)
        found += [f"{path.relative_to(ROOT)} {one}" for one in (*untold(tree), *given_true(tree))]
    assert not found
    assert calls >= 5, "the calls were not found, so this test looks for them in the wrong place"


@pytest.mark.parametrize("source", [
    "AutoTokenizer.from_pretrained(folder)",
    "AutoConfig.from_pretrained(folder, trust_remote_code=True)",
    "AutoConfig.from_pretrained(folder, trust_remote_code=spec.model.trust)",
    "read = AutoModelForCausalLM.from_pretrained",
    "transformers.AutoModelForCausalLM.from_config(config)",
    "AutoModel.from_pretrained(x, trust_remote_code=False, use_kernels=True)",
])  # fmt: skip
def test_call_without_trust_remote_code_is_found(source: str) -> None:
    tree = ast.parse(source)
    assert [*untold(tree), *given_true(tree)]
