"""What a rank does beside its work: its output, once nobody reads it, and the end of a compiler."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dsft.rank.process_setup import has_ninja
from tests.launching import LATE

PROGRAM = """
import sys
from dsft.rank.process_setup import unbroken
sys.stdout = unbroken(1, sys.stdout, redacts=False)
sys.stderr = unbroken(2, sys.stderr, redacts=True)
print("heard", flush=True)
sys.stdin.readline()
for _ in range(3):
    print("not heard \u00e9" * 5000, flush=True)
    sys.stderr.write("nor this\\n")
open(sys.argv[1], "w").write("saved")
"""


def test_a_run_goes_on_when_its_reader_is_gone(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "saved")], cwd=Path.cwd(),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as program:  # fmt: skip
        assert program.stdin and program.stdout and program.stderr
        assert program.stdout.readline() == "heard\n"
        program.stdout.close()
        program.stderr.close()
        program.stdin.write("go on\n")
        program.stdin.close()
        assert program.wait(LATE) == 0
    assert (tmp_path / "saved").read_text() == "saved"


COMPILES = """
import subprocess
from dsft.rank.environment import Launched
from dsft.rank.process_setup import set_up_process
set_up_process(Launched("python", 0, 1, 0, "127.0.0.1", 1), {})
subprocess.run(["ninja"])
"""
RULES = """
rule compile
  command = sh -c 'echo runs > $out.log; sleep 600 & wait'
build a: compile
build b: compile
"""


@pytest.mark.skipif(not has_ninja(), reason="ninja is not installed")
@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT])
def test_compilers_end_with_a_stopped_rank(tmp_path: Path, asked: signal.Signals) -> None:
    (tmp_path / "build.ninja").write_text(RULES)
    with subprocess.Popen(
        [sys.executable, "-c", COMPILES], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    ) as rank:  # fmt: skip
        while not (tmp_path / "a.log").exists():  # ninja has started a shell, and that a sleep
            assert rank.poll() is None
            time.sleep(0.02)
        started = psutil.Process(rank.pid).children(recursive=True)
        rank.send_signal(asked)
        left = psutil.wait_procs(started, timeout=LATE)[1]
        for each in left:
            each.kill()
        rank.communicate(timeout=LATE)
    assert rank.returncode == 75 and len(started) > 1 and not left
