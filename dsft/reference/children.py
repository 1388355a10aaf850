"""The processes that run a pass: takes what to score and each one's place, starts them, hears them out.

A rank of a run starts one, `dsft reference` all of them. A child dies with its parent, however that dies; all
of them end when one fails, on every host. No collective waits for longer than a second.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from socket import socketpair
from typing import cast

from dsft.errors import DsftError, WorldError
from dsft.launch.environment import Launched, names_a_place
from dsft.reference.passes import Pace, Pass, score_pairs

_TICK = 1.0  # seconds
_GRACE = 3  # ticks in which the child that failed first may still tell why

_TAKEN = "EADDRINUSE"  # in what torch says of a port that another process listens on

Say = Callable[[str], None]


class PortTakenError(WorldError):
    """Between the choice of the group's port and its first use another process took it."""


@dataclass(frozen=True)
class End:
    """How a child ended. error: what it raised; fault: the traceback of what is a fault of dsft; code: its
    exit code, where it told nothing."""

    rank: int
    error: DsftError | None = None
    fault: str | None = None
    code: int = 0

    @property
    def failed(self) -> bool:
        return self.error is not None or self.fault is not None or self.code != 0


Gather = Callable[[Sequence[End]], Sequence[Sequence[End]]]
"""The ends of this process's children -> those of each process's: a collective of the processes."""


def run_children(
    asked: Pass, places: Sequence[Launched], gather: Gather, say: Say, tell: Callable[[Pace], None]
) -> None:
    """Start a child for each place and wait until all of all processes have ended. say and tell: are called
    with what the first rank's child says.

    Raises on every process what a child raised; WorldError where one ended without a word; PortTakenError
    where other places may do.
    """
    children: list[_Child] = []
    try:
        children += [_Child(asked, place) for place in places]
        _attend(children, places[0].world_size, gather, say, tell)
    finally:
        for child in children:
            child.end()


def _attend(
    children: Sequence[_Child], count: int, gather: Gather, say: Say, tell: Callable[[Pace], None]
) -> None:
    grace = _GRACE
    while True:
        _hear(children, say, tell)
        ends = [end for part in gather([c.ended for c in children if c.ended]) for end in part]
        failed = [end for end in ends if end.failed]
        told = [end for end in failed if end.error is not None]
        if told:
            raise _of_all(cast(DsftError, told[0].error))
        if failed:
            grace -= 1
            if grace == 0:
                raise _without_word(failed)
        elif len(ends) == count:
            return


def _hear(children: Sequence[_Child], say: Say, tell: Callable[[Pace], None]) -> None:
    """Take what they say, for up to a tick."""
    at_work = {child.connection: child for child in children if child.ended is None}
    for ready in wait(list(at_work), _TICK):
        said = at_work[cast(Connection, ready)].hear()
        if isinstance(said, str):
            say(said)
        elif said is not None:
            tell(said)


def _of_all(error: DsftError) -> DsftError:
    """Every process has it: the first one tells it for all."""
    error.of_one_rank = False
    return error


def _without_word(failed: Sequence[End]) -> Exception:
    end = min(failed, key=_blame)
    if end.fault is not None:
        return RuntimeError(f"rank {end.rank} of the reference's processes:\n{end.fault}")
    how = f"was ended by signal {-end.code}" if end.code < 0 else f"ended with exit code {end.code}"
    why = ", as a machine does whose memory is full" if end.code == -9 else ""
    return WorldError(
        f"rank {end.rank} of the processes that score the reference {how}{why}; what is scored is kept, and "
        "the next start goes on from there."
    )


def _blame(end: End) -> int:
    """The least where it is the cause: a process that is killed makes the others' collectives fail, and one
    that fails makes theirs abort."""
    is_killed = end.code < 0 and end.code != -signal.SIGABRT
    return 0 if is_killed else 1 if end.fault is not None else 2


class _Child:
    """One of them, as its parent sees it."""

    def __init__(self, asked: Pass, place: Launched) -> None:
        ours, theirs = socketpair()
        with ours, theirs:
            words = [str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dsft.reference.child", *words],
                env=_environment(place),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for the parent, which ends its children
            )
            self.connection = Connection(ours.detach())
        self._rank = place.rank
        self.ended: End | None = None
        with suppress(OSError):  # where it is dead already, `hear` says so
            self.connection.send(asked)

    def hear(self) -> str | Pace | None:
        """The next thing that it says; where that is its end, this is kept."""
        try:
            said: str | Pace | End = self.connection.recv()
        except (EOFError, OSError):
            said = End(self._rank, code=self._process.wait() or 1)
        if isinstance(said, End):
            self.ended = said
            return None
        return said

    def end(self) -> None:
        self.connection.close()
        self._process.kill()
        self._process.wait()


def _environment(place: Launched) -> Mapping[str, str]:
    """This process's, but for its place and for what a launcher says of this process alone."""
    own = {name: value for name, value in os.environ.items() if not names_a_place(name)}
    place.export(own)
    root = str(Path(__file__).resolve().parents[2])
    own["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return own


# --- in the child -----------------------------------------------------------------------------------------


def work(descriptor: int) -> int:
    """Score what the parent asks for, and tell it. The exit code."""
    rank = int(os.environ["RANK"])
    connection = Connection(descriptor)
    asked: Pass = connection.recv()
    say: Say = connection.send if rank == 0 else lambda text: None
    try:
        score_pairs(asked, say, connection.send)
        end = End(rank)
    except DsftError as error:
        end = End(rank, error=error)
    except Exception as error:  # told by the parent, as what it is
        end = End(rank, fault=traceback.format_exc())
        if _TAKEN in str(error):
            port = os.environ["MASTER_PORT"]
            end = End(rank, error=PortTakenError(f"port {port} was taken by another process; start again."))
    with suppress(OSError):
        connection.send(end)
    return int(end.failed)
