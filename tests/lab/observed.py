"""What a rank was and what it computed first, written down by a `sitecustomize` that stands on the path of a
lab's hosts: whichever way `dsft/train.py` is started, it is the script itself that runs, unchanged.

    install(folder)                 before the lab, whose hosts get PYTHONPATH=folder
    ranks(folder, "name-of-a-run")  after the run: rank -> Rank
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tests.launching import ROOT

# Wraps the module's loader: nothing is imported earlier than it would be.
HOOK = """
import sys


class Watch:
    def find_spec(self, name, path=None, target=None):
        if name != "dsft.data.steps.steps":
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def executed(module):
            execute(module)
            watch(module.TrainSteps)

        spec.loader.exec_module = executed
        return spec


def watch(steps):
    import hashlib, json, os, socket
    from pathlib import Path

    given = steps.step

    def step(self, index):
        import torch.distributed as dist

        made = given(self, index)
        name = next(word[5:] for word in sys.argv if word.startswith("name="))
        place = Path(__file__).parent / name / f"rank-{dist.get_rank()}.json"
        if index == 0 and not place.exists():
            place.parent.mkdir(exist_ok=True)
            digest = hashlib.sha256()
            for batch in made.micro_batches:
                digest.update(repr(batch.tokens.input_ids.tolist()).encode())
            seen = {
                "host": socket.gethostname(), "rank": dist.get_rank(), "world_size": dist.get_world_size(),
                "local_rank": int(os.environ["LOCAL_RANK"]), "examples": made.example_ids,
                "rows": digest.hexdigest(),
            }
            place.write_text(json.dumps(seen))
        return made

    steps.step = step


sys.meta_path.insert(0, Watch())
"""


@dataclass(frozen=True)
class Rank:
    """examples: the numbers of the first step's, all ranks'; rows: a digest of the token ids of the
    micro-batches that this rank was dealt of it, in order."""

    host: str
    rank: int
    world_size: int
    local_rank: int
    examples: tuple[int, ...]
    rows: str


FORKED = """
import sys

import observing  # beside this file

sys.path[0] = {root!r}
if "dsft.data.steps.steps" in sys.modules:
    observing.watch(sys.modules["dsft.data.steps.steps"].TrainSteps)

from dsft.system.process import end
from dsft.train import main

end(main(sys.argv[1:]))
"""


def install(folder: Path) -> None:
    """`observed.py` is for ranks that are forked, which run no sitecustomize."""
    for name in ("sitecustomize.py", "observing.py"):
        (folder / name).write_text(HOOK)
    (folder / "observed.py").write_text(FORKED.format(root=str(ROOT)))


def ranks(folder: Path, name: str) -> dict[int, Rank]:
    found = {}
    for path in (folder / name).glob("rank-*.json"):
        seen = json.loads(path.read_text())
        found[seen["rank"]] = Rank(**seen | {"examples": tuple(seen["examples"])})
    return found
