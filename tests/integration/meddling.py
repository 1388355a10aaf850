"""`dsft/train.py`, while somebody changes the run's folder: before step 6 its chat template is written over,
before step 10 its lock is removed.

meddling.py FOLDER SPEC [key=value …]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import dsft.run.loop as loop
from dsft.train import main

if __name__ == "__main__":
    folder, *arguments = sys.argv[1:]
    seed_step = loop.seed_step

    def meddling(seed: int, index: int, rank: int) -> None:
        if index == 5:
            Path(folder, "model", "chat_template.jinja").write_text("{{ 'another' }}")
        if index == 9:
            Path(folder, ".lock").unlink()
        seed_step(seed, index, rank)

    loop.seed_step = meddling
    sys.exit(main(arguments))
