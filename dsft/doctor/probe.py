"""The program that the doctor starts on each host: takes orders, a line of JSON, on its standard input; gives
facts, a line of JSON behind a marker, on its standard output. Imports nothing of the run.

    orders  → facts of this host; it keeps listening, and keeps the file with the nonce
    look    → whether it sees the file, and reaches the hosts, that are named there
    the end of its input, or a minute of silence: it removes what it made, and ends

What a shell's start-up file prints comes before the marker, and is left aside.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from dsft.doctor.look.build import build, clear_locks, extensions_root
from dsft.doctor.look.devices import devices
from dsft.doctor.look.inputs import hub_cache, inputs
from dsft.doctor.look.limits import limits
from dsft.doctor.look.network import listening, network, reach
from dsft.doctor.look.software import cuda_of_torch, software
from dsft.doctor.look.storage import nonce_file, sees, storage

MARKER = "dsft-doctor:"
SILENCE = 60.0  # seconds


def main() -> int:
    orders = _read()
    if orders is None:
        return 0
    with ExitStack() as held:
        _answer(facts(orders, held))
        wanted = _read()
        if wanted is not None:
            _answer(second(wanted))
            _read()  # it holds what others look at until all have looked
    return 0


def facts(orders: Mapping[str, Any], held: ExitStack) -> dict[str, Any]:
    """What is asked for, each part by itself: one that fails is {fault: why}."""
    found: dict[str, Any] = {"folder": _enter(orders["folder"])}
    _set(orders["environ"])
    found["devices"] = _part(devices)
    on_cpu = is_on_cpu(found["devices"], cuda_of_torch())
    found["on_cpu"] = on_cpu
    ops = [*orders["ops"], *(orders["ops_on_cpu"] if on_cpu else [])]
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "software": software,
        "listening": lambda: held.enter_context(listening(orders["port"])),
        "network": lambda: network(orders["names"]),
        "storage": lambda: storage(_folders(orders["folders"])),
        "inputs": lambda: inputs(orders["inputs"]),
        "build": lambda: build(ops, on_cpu),
        "limits": limits,
    }
    for name, part in parts.items():
        found[name] = _part(part)
    if orders["shared"] is not None:
        found["shared"] = held.enter_context(nonce_file(orders["shared"], orders["nonce"]))
    return found


def _folders(named: Mapping[str, str | None]) -> dict[str, str]:
    """Those without a path are found by this host's own variables."""
    own = {"TORCH_EXTENSIONS_DIR": extensions_root, "HF_HUB_CACHE": hub_cache}
    return {key: str(own[key]()) if path is None else path for key, path in named.items()}


def is_on_cpu(found: Mapping[str, Any], cuda: str | None) -> bool:
    """As DeepSpeed chooses its accelerator (accelerator/real_accelerator.py)."""
    if found.get("forced"):
        return bool(found["forced"] == "cpu")
    return cuda is None or not found.get("gpus")


def second(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """sees: of the file with the nonce; reached: a name of a target -> seconds, or why not; cleared: a lock's
    path -> what became of it."""
    file = wanted["file"]
    return {
        "sees": None if file is None else sees(file, wanted["nonce"]),
        "reached": _part(lambda: reach(wanted["targets"])),
        "cleared": clear_locks(wanted["locks"]),
    }


def _part(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:  # of a system that is unlike those seen here: the other parts are still told
        return {"fault": f"{type(error).__name__}: {error}"}


def _enter(folder: str) -> str | None:
    """Why the folder that the run starts in cannot be entered; None where it can."""
    try:
        os.chdir(folder)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _set(environ: Mapping[str, str]) -> None:
    """The variables that a launcher would give a rank."""
    os.environ.update(environ)
    for place in reversed(environ.get("PYTHONPATH", "").split(os.pathsep)):
        if place and place not in sys.path:
            sys.path.insert(1, place)


def _read() -> Any:
    """The next line; None at the end and after SILENCE."""
    ready, _, _ = select.select([sys.stdin], [], [], SILENCE)
    line = sys.stdin.readline() if ready else ""
    return json.loads(line) if line.strip() else None


def _answer(found: Mapping[str, Any]) -> None:
    """On a line of its own, whatever was printed before without a line's end."""
    print(f"\n{MARKER}{json.dumps(found)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
