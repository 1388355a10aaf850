"""The program on each host of a run: starts the host's part, tells what happens to it, and ends all of it
when it is told to, or when it hears nothing of the supervisor any more.

    python -m dsft.supervise.agent    orders on standard input, answers on standard output (`wire`)

Nothing is on its command line: neither arguments nor secrets show in a list of processes.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from dsft.supervise.part import Part
from dsft.supervise.processes import kill_job
from dsft.supervise.wire import PING, SILENCE, Inbox, Message, Order, Outbox, order_of
from dsft.system.host import free_port

TICK = 0.2  # seconds between looks at what tells nothing by itself


def main() -> int:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        # A terminal's, a scheduler's: the supervisor tells what to do. Not ignored: ranks would inherit it.
        signal.signal(number, lambda number, frame: None)
    inbox, outbox = Inbox(0), Outbox(1)
    outbox.put({"hello": hello()})
    order = first_order(inbox, outbox)
    if order is None:
        return 0
    scratch = Path(tempfile.mkdtemp(prefix="dsft-agent-"))
    try:
        Path(order.logs).mkdir(parents=True, exist_ok=True)
        part = Part(order, scratch)
    except OSError as error:
        outbox.put({"fault": f"{error.filename or order.argv[0]}: {error.strerror}"})
        return 1
    else:
        outbox.put({"started": part.pid})
        watch(part, inbox, outbox)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


def hello() -> Message:
    """Where this host is reached, and a port that is free on it."""
    addresses = {
        name: [each.address for each in found if each.family in (socket.AF_INET, socket.AF_INET6)]
        for name, found in psutil.net_if_addrs().items()
    }
    return {"host": socket.gethostname(), "pid": os.getpid(), "addresses": addresses, "port": free_port()}


def first_order(inbox: Inbox, outbox: Outbox) -> Order | None:
    """None where a job was swept instead, or nobody is there any more."""
    heard = time.monotonic()
    while not inbox.ended and time.monotonic() < heard + SILENCE:
        wait([inbox.descriptor], [], PING)
        for message in inbox.read():
            heard = time.monotonic()
            if isinstance(message, dict) and "order" in message:
                return order_of(message)
            if isinstance(message, dict) and "sweep" in message:
                outbox.put({"end": len(kill_job(str(message["sweep"])))})
                return None
            if isinstance(message, dict) and "end" in message:
                outbox.put({"end": 0})
                return None
    return None


def watch(part: Part, inbox: Inbox, outbox: Outbox) -> None:
    """Until the part has ended and was cleared away, told by the supervisor or because it is silent."""
    heard = pulsed = time.monotonic()
    deadline: float | None = None
    while True:
        wait([inbox.descriptor, *part.descriptors()], [outbox.descriptor] if outbox.waits else [], TICK)
        now = time.monotonic()
        for message in inbox.read():
            heard = now
            if isinstance(message, dict):
                deadline = obey(part, message, now, deadline)
        for event in part.events():
            outbox.put(event, may_drop="lines" in event and "tail" not in event)
        if now >= pulsed + PING:
            pulsed = now
            outbox.put({"pulses": [pulse.told() for pulse in part.pulses.values()]}, may_drop=True)
        outbox.flush()
        if inbox.ended or now > heard + SILENCE:
            deadline = now  # nobody would tell it to end
        ended = part.code is not None and not part.living()
        if ended or (deadline is not None and now >= deadline):
            break
    left = part.end()
    for event in part.events():
        outbox.put(event)
    outbox.put({"end": len(left)})
    flush(outbox)


def obey(part: Part, message: Message, now: float, deadline: float | None) -> float | None:
    """When the part is to be killed."""
    if "signal" in message:
        part.signal(int(message["signal"]))
    if "stacks" in message:
        part.stacks()
    if "end" in message:
        wanted = now + float(message["end"])
        return wanted if deadline is None else min(deadline, wanted)
    return deadline


def flush(outbox: Outbox) -> None:
    """For a second at most."""
    deadline = time.monotonic() + 1
    while outbox.waits and time.monotonic() < deadline:
        wait([], [outbox.descriptor], TICK)
        outbox.flush()


def wait(
    readable: Sequence[int | socket.socket], writable: Sequence[int | socket.socket], seconds: float
) -> None:
    poll = select.poll()
    for descriptor in readable:
        poll.register(descriptor, select.POLLIN)
    for descriptor in writable:
        poll.register(descriptor, select.POLLOUT)
    with suppress(InterruptedError):
        poll.poll(seconds * 1000)


if __name__ == "__main__":
    sys.exit(main())
