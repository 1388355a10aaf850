"""A rank's output, once nobody reads it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from dsft.launch.live import unbroken
sys.stdout, sys.stderr = unbroken(1, sys.stdout), unbroken(2, sys.stderr)
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
        assert program.wait(30) == 0
    assert (tmp_path / "saved").read_text() == "saved"
