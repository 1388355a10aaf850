"""`dsft/train.py`, but each step takes a tenth of a second longer, so that a fault meets one. The value of
HF_TOKEN, if it is set, is printed in the first step in the ways in which libraries print.

slow.py SPEC [key=value …]
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

    import dsft.run.loop as loop
    from dsft.rank.launched import AGENT
    from dsft.system.process import end
    from dsft.train import main

    seed_step, first = loop.seed_step, iter([True])

    def slowly(*arguments: Any) -> None:
        token = os.environ.get("HF_TOKEN")
        if token and next(first, False):
            sys.stdout.write(f"printed: {token[:9]}")
            sys.stdout.flush()
            print(token[9:])
            logging.getLogger("library").warning("logged: %s", token)
            warnings.warn(f"warned: {token}", stacklevel=1)
            if AGENT in os.environ:
                os.write(2, f"not by Python: {token}\n".encode())
        time.sleep(0.1)
        seed_step(*arguments)

    loop.seed_step = slowly
    end(main(sys.argv[1:]))
