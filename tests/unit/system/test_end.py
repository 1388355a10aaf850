"""How a process ends."""

import subprocess
import sys
from pathlib import Path

import pytest

# What fails a plain end here represents a thread of a process group that is still running (SIGABRT).
PROGRAM = """
import atexit, os, sys, threading
from dsft.system.process import end

class Left:
    def __del__(self):
        os.abort()

sys.left = Left()
atexit.register(print, "registered for the end")
print("unflushed", end=" ")
end(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 76])
def test_leftovers_do_not_change_the_exit_code(code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(code)], capture_output=True, text=True, cwd=Path.cwd()
    )
    assert (done.returncode, done.stdout) == (code, "unflushed registered for the end\n"), done.stderr
