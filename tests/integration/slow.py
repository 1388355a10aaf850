"""`dsft/train.py`, but each step takes a tenth of a second longer, so that a fault meets one.

slow.py SPEC [key=value …]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

    import dsft.run.loop as loop
    from dsft.system.process import end
    from dsft.train import main

    seed_step = loop.seed_step

    def slowly(*arguments: Any) -> None:
        time.sleep(0.1)
        seed_step(*arguments)

    loop.seed_step = slowly
    end(main(sys.argv[1:]))
