"""dsft as a wheel: it has every file of the package, and works from an empty folder outside the checkout, in
a Python that has no wandb."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.launching import LATE

ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q")
OFFLINE = ("--no-deps", "--no-index")
WITHOUT_WANDB = "import sys\nsys.modules['wandb'] = None\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built elsewhere, from what the Containerfile copies: a build leaves folders beside its sources."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "dsft", source / "dsft", ignore=shutil.ignore_patterns("__pycache__"))
    [copied] = re.findall(r"^COPY (.+) /opt/dsft/$", (ROOT / "Containerfile").read_text(), re.M)
    for name in copied.split():
        shutil.copy(ROOT / name, source)
    build = [*PIP, "wheel", *OFFLINE, "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run(build, check=True, timeout=LATE)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path) -> dict[str, str]:
    """The environment in which Python finds the wheel's files and no wandb, in place of the checkout."""
    folder = wheel.parent / "installed"
    install = [*PIP, "install", *OFFLINE, "--no-compile", "--target", str(folder), str(wheel)]
    subprocess.run(install, check=True, timeout=LATE)
    (folder / "sitecustomize.py").write_text(WITHOUT_WANDB)
    return {**os.environ, "PYTHONPATH": str(folder), "DS_ACCELERATOR": "cpu"}


def test_it_has_every_file_of_the_package_and_what_gpus_need(wheel: Path) -> None:
    tracked = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "dsft"],
        check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    with zipfile.ZipFile(wheel) as file:
        names = [name for name in file.namelist() if ".dist-info/" not in name]
        metadata = next(name for name in file.namelist() if name.endswith("METADATA"))
        needs = file.read(metadata).decode().splitlines()
    assert sorted(names) == sorted(name for name in tracked if (ROOT / name).is_file())
    assert any(line.startswith("Requires-Dist: liger-kernel") and 'extra == "gpu"' in line for line in needs)
    assert any(line.startswith("Requires-Dist: wandb") and "extra" not in line for line in needs)


def test_commands_work_from_an_empty_folder(installed: Mapping[str, str], tmp_path: Path) -> None:
    """`plan` counts the parameters in a child process, `preview --html` reads the templates of the page."""
    program = Path(installed["PYTHONPATH"], "bin", "dsft")
    commands = (
        ["--help"],
        ["init", "a"],
        ["validate", "specs/a.yaml"],
        ["plan", "specs/a.yaml", "--json"],
        ["preview", "specs/a.yaml", "--html", "rows.html"],
        ["generate", "specs/a.yaml"],
    )
    environment = {**installed, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for words in commands:
        done = subprocess.run(
            [str(program), *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LATE,
        )
        assert done.returncode == 0, (words, done.stderr)
    script = (tmp_path / "scripts/launch/a.deepspeed.sh").read_text()
    assert "installed/dsft/train.py" in script and str(ROOT) not in script


@pytest.mark.parametrize(
    ("override", "code", "says"),
    [
        ("train.max_steps=1", 0, "talk to it"),
        pytest.param(  # tests/unit/report/test_sinks.py always asks for a package that is not there
            "wandb={mode: offline}", 66, "pip install wandb", marks=pytest.mark.long
        ),
    ],
)
def test_a_run_starts_without_wandb_unless_its_spec_has_it(
    override: str, code: int, says: str, installed: Mapping[str, str], tmp_path: Path
) -> None:
    spec = ROOT / "specs" / "quickstart.yaml"
    train = Path(installed["PYTHONPATH"], "dsft", "train.py")
    done = subprocess.run(
        [sys.executable, str(train), str(spec), override, "train.eval_every=1"],
        cwd=tmp_path, env=installed, capture_output=True, text=True, timeout=LATE,
    )  # fmt: skip
    assert (done.returncode, says in done.stdout + done.stderr) == (code, True), done.stderr
