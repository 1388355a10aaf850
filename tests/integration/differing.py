"""`dsft/train.py`, but rank 1 works in another folder, as on a host with a disk of its own.

differing.py FOLDER SPEC [key=value …]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dsft.train import main

if __name__ == "__main__":
    folder, *arguments = sys.argv[1:]
    if os.environ["RANK"] == "1":
        os.chdir(folder)
    sys.exit(main(arguments))
