"""How a process of dsft ends, well or not. Takes the exit code."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def end(code: int) -> NoReturn:
    """At once, after what was registered for the end (a W&B service, temporary folders): the threads of a
    process group can abort the interpreter's own end, and a launcher takes that for a failed run."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
