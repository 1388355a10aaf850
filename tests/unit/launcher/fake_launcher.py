"""As deepspeed.launcher.launch: starts the ranks of a host, looks at them each second, and ends the others
with the first that fails.

fake_launcher.py FIRST COUNT WORLD PROGRAM…
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

first, count, world = map(int, sys.argv[1:4])
ranks = [
    subprocess.Popen(
        [sys.executable, *sys.argv[4:]],
        env={**os.environ, "RANK": str(first + n), "LOCAL_RANK": str(n), "WORLD_SIZE": str(world)},
    )
    for n in range(count)
]


def end(*_: object) -> None:
    for rank in ranks:
        rank.terminate()


signal.signal(signal.SIGTERM, end)
while ranks:
    for rank in list(ranks):
        code = rank.poll()
        if code is not None:
            ranks.remove(rank)
            if code:
                end()
                sys.exit(code)
    time.sleep(1)
