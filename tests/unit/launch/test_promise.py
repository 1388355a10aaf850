"""A world of another size than promised stops; so does a hostfile that is not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dsft.errors import WorldError
from dsft.launch.environment import Launched
from dsft.launch.promise import _promised, check_promise, deepspeed_arguments

HOSTS = {"node1": 4, "node2": 2}


def launched(world_size: int, launcher: str = "torchrun") -> Launched:
    return Launched(launcher, 0, world_size, 0, "127.0.0.1", 29500)


def test_the_promised_world_passes() -> None:
    check_promise(HOSTS, launched(6))
    check_promise(None, launched(3))


@pytest.mark.parametrize(
    ("launcher", "size", "cause"),
    [
        ("python", 1, "plain python starts one"),
        ("deepspeed", 1, "its --hostfile was left out"),
        ("torchrun", 8, "same hosts"),
    ],
)
def test_another_world_stops_with_both_numbers(launcher: str, size: int, cause: str) -> None:
    with pytest.raises(WorldError, match=rf"promises 6 processes \(node1 4 \+ node2 2\).*{size}.*{cause}"):
        check_promise(HOSTS, launched(size, launcher))


def command(*words: str) -> list[str]:
    return ["/env/bin/python", "/env/bin/deepspeed", *words]


def test_the_launchers_options_end_where_the_script_begins() -> None:
    arguments = deepspeed_arguments(command("--num_gpus", "2", "dsft/train.py", "--hostfile", "mine"))
    assert arguments is not None and arguments.hostfile is None and arguments.num_gpus == 2
    arguments = deepspeed_arguments(
        command("--master_port=1", "--hostfile=h", "--force_multi", "train.py", "a=b")
    )
    assert arguments is not None and arguments.hostfile == "h"
    assert deepspeed_arguments(["/env/bin/python", "-m", "pytest"]) is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), 6),
        (("--num_nodes", "1"), 4),
        (("--num_gpus", "1"), 2),
        (("--include", "node2"), 2),
        (("--include", "node1:0,2@node2:1"), 3),
        (("--exclude", "node1"), 2),
        (("--exclude", "node1:0"), 5),
    ],
)
def test_how_many_processes_the_launcher_starts(options: tuple[str, ...], expected: int) -> None:
    arguments = deepspeed_arguments(command(*options, "train.py"))
    assert arguments is not None and _promised(HOSTS, arguments) == expected


CHILD = """
import sys
from dsft.errors import WorldError
from dsft.launch.environment import Launched
from dsft.launch.promise import check_promise
try:
    check_promise(None, Launched("deepspeed", 0, int(sys.argv[1]), 0, "127.0.0.1", 1))
    print("passed")
except WorldError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("text", "world", "said"),
    [
        (None, 1, "--hostfile hosts does not exist"),
        ("a slots=2\n", 1, "promises 2 processes but 1"),
        ("a slots=2\n", 2, "passed"),
    ],
)
def test_the_hostfile_on_the_parents_command_line_is_checked(
    tmp_path: Path, text: str | None, world: int, said: str
) -> None:
    """A parent that looks like the launcher (a script named deepspeed, with its options) starts the child."""
    if text is not None:
        (tmp_path / "hosts").write_text(text)
    launcher = tmp_path / "deepspeed"
    launcher.write_text(
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {CHILD!r}, '{world}'])\n"
    )
    outcome = subprocess.run(
        [sys.executable, str(launcher), "--hostfile", "hosts", "train.py"],
        cwd=tmp_path, env={"PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert said in outcome.stdout, outcome.stderr
