"""`dsft launch SPEC [key=value …]` with ranks that train nothing: for faults of which training is
no part. Hosts, ssh, agents and the supervisor are real.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from dsft.launcher import command

RESTARTS = int(os.environ.get("FAKE_RESTARTS", "0"))
command.EVERY, command.PAUSE = 0.2, 0.5  # seconds: nobody waits for ports or devices here
FAKES = Path(__file__).resolve().parent.parent / "unit" / "launcher"


if __name__ == "__main__":
    settings = command.prepared(Path(sys.argv[1]), tuple(sys.argv[2:]), command.Options(restarts=RESTARTS))
    plan = replace(settings.plan, program=(str(FAKES / "fake_rank.py"), "6000"))
    sys.exit(command.run(replace(settings, plan=plan)))
