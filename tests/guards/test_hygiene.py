"""What a reader may rely on in every file: docstrings, names, descriptions, nothing of anyone's machine."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dsft.spec import schema

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "dsft").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_module_has_a_docstring() -> None:
    """In a sentence; a file without a statement has nothing to say."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}
    words = {
        relative(path): (ast.get_docstring(tree) or "").split() for path, tree in trees.items() if tree.body
    }
    assert len(words) > 100
    assert [path for path, docstring in words.items() if len(docstring) < 4] == []


def test_no_module_shadows_another() -> None:
    """A launcher puts dsft/ first on the path: `dsft/json.py` would then be what `import json` finds."""
    ours = {path.stem for path in (ROOT / "dsft").iterdir() if not path.name.startswith("_")}
    dependencies = {
        name
        for name, owners in importlib.metadata.packages_distributions().items()
        if set(owners) != {"dsft"}
    }
    assert len(ours) > 8 and {"torch", "yaml"} <= dependencies
    assert not ours & (set(sys.stdlib_module_names) | dependencies)


def test_every_spec_key_has_a_description() -> None:
    kinds = [kind for kind in vars(schema).values() if isinstance(kind, type)]
    sections = [kind for kind in kinds if issubclass(kind, schema.Section)]
    found = {section.__name__: section.__doc__ or "" for section in sections}
    for section in sections:
        keys = section.model_fields.items()
        found |= {f"{section.__name__}.{name}": field.description or "" for name, field in keys}
    assert len(found) > 100
    sentence = re.compile(r"\S.{7,}[.]", re.DOTALL)
    assert {name: text for name, text in found.items() if not sentence.fullmatch(text)} == {}


# Built from parts, so that this file does not find itself.
MACHINE = re.compile(
    "|".join(
        [
            "/" + r"root/",
            "/" + r"home/\w+/",
            "/" + r"Users/\w+/",
            "(?<![A-Za-z0-9_.)}])/" + r"work/",
            "/" + r"tmp/dev\b",
            "/" + r"opt/(wheels|pypi)",
            r"files\." + r"pythonhosted",
            r"\bhttps?://pypi" + r"\.",
            r"(?<![\d.])(10|192\.168)" + r"\.\d+\.\d+\.\d+:\d+/simple",
            r"^[<>]" + r"{7} ",  # of a merge that was not finished
        ]
    ),
    re.MULTILINE,
)


def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode != 0:
        pytest.skip("this is no git checkout, so no file is tracked")
    return [ROOT / name for name in listing.stdout.split("\0") if name]


def test_no_file_names_a_machine() -> None:
    found = []
    for path in tracked():
        if path.is_file() and path.stat().st_size < 2**20:
            text = path.read_text(encoding="utf-8", errors="replace")
            found += [f"{relative(path)}: {match.group()}" for match in MACHINE.finditer(text)]
    assert not found


def test_the_lock_pins_every_dependency() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", pin) for pin in pins)  # no local versions
    locked = {normal(pin.split("==")[0]) for pin in pins}
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    assert {normal(re.split(r"[<>=!~ ]", requirement)[0]) for requirement in wanted} <= locked


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
