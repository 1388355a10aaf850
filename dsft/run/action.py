"""Do on the ranks what a command asks of them instead of training: `dsft.commands.on_ranks` starts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dsft.run.evaluate import evaluated
from dsft.run.main import joined
from dsft.run.replay import replayed
from dsft.setup.run import Job
from dsft.system.files import atomic_write, write_error

ACTIONS = {"eval": evaluated, "replay": replayed}


def act(job: Job, path: Path) -> None:
    """Do what the JSON `path` asks for, and write the result into the run's folder. Raises DsftError."""
    asked = json.loads(path.read_text(encoding="utf-8"))
    with joined(job) as (run, ranks):
        result = ACTIONS[asked["action"]](run, asked)
        run.world.first(lambda: _write(run.folder / asked["result"], result))
        ranks.leave()
        run.world.close()


def _write(path: Path, result: dict[str, Any]) -> None:
    try:
        with atomic_write(path) as out:
            out.write(json.dumps(result, indent=1).encode())
    except OSError as error:
        raise write_error(path, error) from None
