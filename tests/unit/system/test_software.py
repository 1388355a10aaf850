"""What decides a run's numbers on this machine, as ranks compare it."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

from dsft.system.software import RANGES, SWITCHES, code_digest, decisive_versions, outside, switches

ROOT = Path(__file__).resolve().parents[3]


def test_code_digest_covers_python_files_only(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    file = tmp_path / "package" / "one.py"
    file.write_text("a = 1\n")
    digest = code_digest(tmp_path)
    (tmp_path / "package" / ".#one.py").symlink_to("user@host.1:2")  # an editor's lock, which leads nowhere
    (tmp_path / "notes.txt").write_text("b")
    assert code_digest(tmp_path) == digest
    file.write_text("a = 2\n")
    assert code_digest(tmp_path) != digest


def test_versions_and_variables() -> None:
    assert None not in [decisive_versions()[name] for name in ("python", "dsft", "torch")]
    assert switches({SWITCHES[0]: "1", "HOME": "/"}) == {SWITCHES[0]: "1"}


def test_version_ranges_are_the_projects() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    given = [re.fullmatch(r"([\w-]+)(.*)", text) for text in wanted["dependencies"]]
    ranges = {match[1]: match[2] for match in given if match}
    assert {name: ranges[name] for name in RANGES} == RANGES
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    oldest = dict(line.split("==") for line in lines if "==" in line)
    for name, specifier in ranges.items():
        lower = Version(specifier.split(",")[0].removeprefix(">="))
        assert Version(oldest[name.lower().replace("_", "-")]) == lower, name


@pytest.mark.parametrize(("name", "version", "is_reported"), [
    ("torch", "2.9.1", True),
    ("torch", "2.10.0+cu130", False),
    ("torch", "2.15.0", False),
    ("deepspeed", "0.20.0", True),
    ("transformers", "5.16.1", True),
    ("transformers", "5.17.0", False),
    ("transformers", None, False),
    ("numpy", "1.0", False),
])  # fmt: skip
def test_unsupported_version_is_reported(name: str, version: str | None, is_reported: bool) -> None:
    assert len(outside({name: version})) == is_reported
