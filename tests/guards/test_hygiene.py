"""What a reader may rely on in every file: docstrings, names, descriptions, nothing of anyone's machine."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel

from dsft.spec import schema

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "dsft").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_every_module_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree) or not tree.body  # an empty file has nothing to say


def test_no_module_hides_another() -> None:
    """A launcher puts dsft/ first on the path: `dsft/json.py` would then be what `import json` finds."""
    ours = {path.stem for path in (ROOT / "dsft").iterdir() if not path.name.startswith("_")}
    dependencies = {
        name
        for name, owners in importlib.metadata.packages_distributions().items()
        if set(owners) != {"dsft"}
    }
    assert len(ours) > 8 and {"torch", "yaml"} <= dependencies
    assert not ours & (set(sys.stdlib_module_names) | dependencies)


SECTIONS = [
    kind for kind in vars(schema).values() if isinstance(kind, type) and issubclass(kind, schema.Section)
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda kind: kind.__name__)
def test_every_key_of_the_spec_has_a_sentence(section: type[BaseModel]) -> None:
    assert section.__doc__
    for name, field in section.model_fields.items():
        description = field.description or ""
        assert re.fullmatch(r"\S.{7,}[.]", description), f"{section.__name__}.{name}: {description!r}"


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
        ]
    )
)


def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode != 0:
        pytest.skip("this is no git checkout, so no file is tracked")
    return [ROOT / name for name in listing.stdout.split("\0") if name]


def test_no_file_speaks_of_one_machine() -> None:
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
