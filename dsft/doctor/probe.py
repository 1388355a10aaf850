"""The program that the doctor starts on each host. It answers two questions over `dsft.remote`: what this
host is like; then whether it sees the first host's nonce file and reaches the other hosts. It keeps its ports
open and the nonce file in place until its input ends. Imports no training code."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from dsft.doctor import devices, inputs, limits, network, ops, software, storage
from dsft.engine.toolchain import build_folder
from dsft.remote import own_connection

SILENCE = 60.0  # seconds without a question, or of a disk or a name service that does not answer


def main() -> None:
    asyncio.run(serve())


async def serve() -> None:
    """Answer questions until the input ends, or nothing happens for SILENCE seconds."""
    with ExitStack() as resources, suppress(TimeoutError):
        connection = await asyncio.wait_for(own_connection(), SILENCE)
        order = await asyncio.wait_for(connection.receive(), SILENCE)
        while order is not None:
            answer = second if "targets" in order else facts
            working = asyncio.create_task(asyncio.to_thread(answer, order, resources))
            following = asyncio.create_task(connection.receive())  # comes after the answer, or at the end
            await asyncio.wait({working, following}, timeout=SILENCE, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                break
            connection.send(working.result())
            order = await asyncio.wait_for(following, SILENCE)
    os._exit(0)  # do not wait for threads that hang


def facts(orders: Mapping[str, Any], resources: ExitStack) -> dict[str, Any]:
    """Return all parts of the first answer; a part that fails is {fault: why}."""
    found: dict[str, Any] = {"folder": _enter(orders["folder"])}
    found["devices"] = _part(devices.look)
    on_cpu = is_on_cpu(found["devices"], software.cuda_of_torch())
    found["on_cpu"] = on_cpu
    needed = [*orders["ops"], *(orders["ops_on_cpu"] if on_cpu else [])]
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "software": software.look,
        "listening": lambda: resources.enter_context(network.listening(orders["port"])),
        "network": lambda: network.look(orders["names"]),
        "storage": lambda: storage.look(_folders(orders["folders"])),
        "inputs": lambda: inputs.look(orders["inputs"]),
        "build": lambda: ops.look(needed, on_cpu),
        "limits": limits.look,
    }
    for name, part in parts.items():
        found[name] = _part(part)
    if orders["shared"] is not None:
        found["shared"] = resources.enter_context(storage.nonce_file(orders["shared"], orders["nonce"]))
    return found


def _folders(named: Mapping[str, str | None]) -> dict[str, str]:
    """Fill in the folders without a path from this host's own variables."""
    own = {storage.EXTENSIONS: build_folder, storage.HUB: inputs.hub_cache}
    return {key: str(own[key]()) if path is None else path for key, path in named.items()}


def is_on_cpu(found: Mapping[str, Any], cuda: str | None) -> bool:
    """Return whether DeepSpeed would choose the CPU (accelerator/real_accelerator.py)."""
    if found.get("forced"):
        return bool(found["forced"] == "cpu")
    return cuda is None or not found.get("gpus")


def second(wanted: Mapping[str, Any], resources: ExitStack) -> dict[str, Any]:
    """Return the second answer. sees: "yes" or why the nonce file is not visible; reached: target -> seconds,
    or why it failed."""
    file = wanted["file"]
    return {
        "sees": None if file is None else storage.sees(file, wanted["nonce"]),
        "reached": _part(lambda: network.reach(wanted["targets"])),
    }


def _part(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:  # an unexpected system: still return the other parts
        return {"fault": f"{type(error).__name__}: {error}"}


def _enter(folder: str) -> str | None:
    """Enter the folder in which the run starts. Return None, or why it cannot be entered."""
    try:
        os.chdir(folder)
    except OSError as error:
        return error.strerror or str(error)
    return None


if __name__ == "__main__":
    main()
