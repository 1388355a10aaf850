"""How much a process of dsft prints, and how it ends: at once or together with its parent."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
from typing import NoReturn

VERBOSE = "DSFT_VERBOSE"
"""Set to 1 (by -v), it makes rank 0 print every step and the details of the start."""

EVERY_STEP = "DSFT_EVERY_STEP"
"""Set to 1 by a launcher on a terminal, which shows the steps as one line that changes."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def is_verbose() -> bool:
    return is_set(VERBOSE)


def is_set(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def end(code: int) -> NoReturn:
    """Run the registered exit functions (a W&B service, temporary folders), then exit at once with the code.

    The interpreter's own exit is skipped: threads of a process group can abort in it, and a launcher takes
    that for a failed run.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent process ends, however that ends (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
