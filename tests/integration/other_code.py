"""`dsft/train.py`, but rank 1 runs another checkout, with another variable, as a host with a copy of its own.

other_code.py CHECKOUT SPEC [key=value …]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

checkout, *arguments = sys.argv[1:]
if os.environ["RANK"] == "1":
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    script = Path(checkout, "dsft", "train.py")
else:
    script = Path(__file__).resolve().parents[2] / "dsft" / "train.py"

os.execv(sys.executable, [sys.executable, str(script), *arguments])
