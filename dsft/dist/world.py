"""Join the process group, and let ranks agree through a `World`.

Every method but `close` is a collective: all ranks call it, in the same order.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from dsft.dist.device import describe_device, take_device
from dsft.errors import DsftError, WorldError
from dsft.rank.environment import Launched
from dsft.rank.launched import port_taken
from dsft.rank.places import Device, RankPlace, current_place, shared_device
from dsft.rank.route import address_towards, interface_towards
from dsft.spec.differences import Difference, json_differences
from dsft.spec.layout import Layout
from dsft.spec.schema import Accelerator

T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)  # rank 0 hashes a checkpoint while the others wait
_ANSWER_READ = timedelta(seconds=20)
"""Time for the others to read the answer before rank 0 ends, and its store with it."""
_SHOWN = 8  # differences between ranks that a message shows


@dataclass(frozen=True)
class World:
    """This rank's place among all ranks. rank = stage × shards + shard_rank, as in DeepSpeed's
    PipeDataParallelTopology. places: of all ranks, by rank."""

    rank: int
    world_size: int
    local_rank: int
    layout: Layout
    device: torch.device
    places: tuple[RankPlace, ...] = ()

    @property
    def stage(self) -> int:
        return self.layout.stage(self.rank)

    @property
    def data_rank(self) -> int:
        return self.layout.data_rank(self.rank)

    @property
    def shard_rank(self) -> int:
        return self.layout.shard_rank(self.rank)

    @property
    def sequence_rank(self) -> int:
        return self.layout.sequence_rank(self.rank)

    def sum(self, mine: Tensor) -> Tensor:
        """Return the sum over all ranks; `mine` is not changed."""
        total = mine.clone()
        dist.all_reduce(total)
        return total

    def gather(self, mine: T) -> list[T]:
        """Return every rank's value, by rank, on every rank."""
        if self.world_size == 1:
            return [mine]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, mine)
        return values

    def broadcast(self, mine: T) -> T:
        """Return rank 0's value on every rank."""
        if self.world_size == 1:
            return mine
        box = [mine]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def first(self, work: Callable[[], T]) -> T:
        """Return rank 0's result of `work` on every rank; a DsftError that it raises is raised on every
        rank."""
        result, failure = self.broadcast(_outcome(work) if self.rank == 0 else (None, None))
        if failure is not None:
            raise failure
        return cast(T, result)

    def each(self, work: Callable[[], T]) -> T:
        """Return this rank's own result of `work`, which is local. Where it fails on some ranks, the first
        one's error is raised on all: no rank is left waiting, and rank 0 can report it."""
        result, mine = _outcome(work)
        for failure in self.gather(mine):
            if failure is not None:
                raise failure
        return cast(T, result)

    def hosts_first(self, work: Callable[[], object]) -> None:
        """Run `work`, which is local, on one rank of each host and then on the others. Where it fails on one,
        its error is raised on all, and the others do not run it."""
        leads = self.local_rank == 0
        self.each(lambda: work() if leads else None)
        self.each(lambda: None if leads else work())

    def check_same(self, mine: Mapping[str, Any]) -> None:
        """Raise WorldError on every rank, with the differing keys and values, unless all ranks give the same
        JSON values by the same names."""
        digests = self.gather({name: _digest(value) for name, value in mine.items()})
        names = [name for name in mine if any(other.get(name) != digests[0][name] for other in digests)]
        if names:
            raise WorldError(_mismatch_message(self.gather({name: mine[name] for name in names})))

    def close(self) -> None:
        dist.destroy_process_group()


def _outcome(work: Callable[[], T]) -> tuple[T | None, DsftError | None]:
    try:
        return work(), None
    except DsftError as error:
        return None, error


def join_group(
    launched: Launched,
    layout: Layout,
    identity: Mapping[str, Any] | None = None,
    expected: Accelerator | None = None,
) -> World:
    """Join the process group: NCCL on GPUs, gloo on CPUs. A process started alone joins a group of one.
    `dsft.engine.join.join` also hands the group to DeepSpeed.

    `identity` has JSON values, by name, that must be the same on all ranks. They are compared, with the kind
    of device, before any collective: ranks with another backend or other code could not take part in one.
    `expected` is what cluster.accelerator names. Between hosts gloo uses the interface that leads to them,
    unless GLOO_SOCKET_IFNAME names one.

    Raises WorldError where the ranks differ, where a rank has no device or another rank's, and where rank 0's
    port is taken.
    """
    launched.export(os.environ)
    device = take_device(launched.local_rank, expected, os.environ)
    name = device.type
    own = current_place(launched.local_rank, describe_device(device), address_towards(launched.master_addr))
    if name == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan for each new length of a row
    store = _store(launched)
    # An agent of torchrun keeps its store when it starts the ranks again.
    attempt = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    same = {**(identity or {}), "device": name}
    places = compare_ranks(attempt, launched.rank, launched.world_size, same, own)
    world = World(launched.rank, launched.world_size, launched.local_rank, layout, device, tuple(places))
    interface = interface_towards(places, world.rank)
    if interface is not None and not os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    dist.init_process_group(
        backend(device),
        timeout=TIMEOUT,
        store=PrefixStore("group", store),
        rank=world.rank,
        world_size=world.world_size,
        # as DeepSpeed's TorchBackend does: NCCL connects at once, and splits this group for each new one
        device_id=device if name == "cuda" and world.world_size > 1 else None,
    )
    world.check_same(identity or {})  # again: after a change of hosts the store has what others wrote
    return world


def backend(device: torch.device) -> str:
    """Return the name of the process group's backend on a device."""
    return "gloo" if device.type == "cpu" else str(get_accelerator().communication_backend_name())


def _store(launched: Launched) -> Store:
    """Return the store at which the ranks meet. Raises WorldError where a program has taken rank 0's port
    since `check_port` found it free."""
    try:
        store, _, _ = next(rendezvous("env://", launched.rank, launched.world_size, timeout=TIMEOUT))
    except dist.DistNetworkError as error:
        if launched.rank == 0 and "EADDRINUSE" in str(error):
            raise port_taken(launched, os.environ) from None
        raise
    store.set_timeout(TIMEOUT)
    return store


def compare_ranks(
    store: Store, rank: int, world_size: int, mine: Mapping[str, Any], place: RankPlace
) -> list[RankPlace]:
    """Compare `mine` of all ranks through their common store, and return the places of all, by rank: rank 0
    reads all of them and writes the result. Raises WorldError on every rank where they differ, and where two
    have the same device."""
    store.set(f"identity/{rank}", json.dumps(mine))
    store.set(f"place/{rank}", json.dumps(asdict(place)))
    places: list[RankPlace] = []
    if rank == 0:
        found = [json.loads(store.get(f"identity/{other}")) for other in range(world_size)]
        described = [json.loads(store.get(f"place/{other}")) for other in range(world_size)]
        places = _places(described)
        is_same = all(one == found[0] for one in found)
        wrong = (shared_device(places) or "") if is_same else _mismatch_message(found)
        store.set("places", json.dumps(described))
        store.set("wrong", wrong)
        if wrong:
            with contextlib.suppress(dist.DistError):  # a rank that has ended need not read it
                store.wait([f"answer_read/{other}" for other in range(1, world_size)], _ANSWER_READ)
    else:
        wrong = store.get("wrong").decode()
        places = _places(json.loads(store.get("places")))
        store.set(f"answer_read/{rank}", "")
    if wrong:
        raise WorldError(wrong)
    return places


def _places(described: Sequence[dict[str, Any]]) -> list[RankPlace]:
    return [RankPlace(**{**one, "device": Device(**one["device"])}) for one in described]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _mismatch_message(values: Sequence[Any]) -> str:
    """Return the message that names what differs from rank 0's value, and on which ranks. values: of all
    ranks, in order."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, one in enumerate(values):
        for difference in json_differences(values[0], one):
            ranks.setdefault(_clause(difference), []).append(rank)
    clauses = [
        f"{clause} on rank{'s' if len(of) > 1 else ''} {_listed(of)}" for (_, clause), of in ranks.items()
    ]
    more = f"; and {len(clauses) - _SHOWN} more" if len(clauses) > _SHOWN else ""
    return (
        f"The ranks would train different models: {'; '.join(clauses[:_SHOWN])}{more}. All hosts need the "
        "same files, packages and variables; dsft doctor SPEC compares them."
    )


def _clause(difference: Difference) -> tuple[str, str]:
    return difference.key, difference.clause("is {} on rank 0", "{}")


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:_SHOWN])
    return shown if len(ranks) <= _SHOWN else f"{shown} and {len(ranks) - _SHOWN} more"


# --- out-of-band messages ---------------------------------------------------------------------------------
#
# Separate gloo groups with CPU tensors, on any device. NCCL does not report that a process has ended: the
# others wait in its collective for half an hour. Under gloo the kernel closes the connection, and the rank
# after it in the ring notices at once.

_FOR_EVER = timedelta(days=3650)
_LEFT = 0  # message in the ring: this rank ends normally; 1 + n: rank n has died


class Agreement:
    """Asynchronous maximum over all ranks, which build it together."""

    def __init__(self, world: World) -> None:
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT) if world.world_size > 1 else None

    def begin(self, mine: int) -> Callable[[], int]:
        """Start a collective and return at once; the returned function waits for the highest `mine` of all
        ranks."""
        if self._group is None:
            return lambda: mine
        highest = torch.tensor([mine])
        work = dist.all_reduce(highest, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None, "it is asynchronous"

        def agreed() -> int:
            work.wait()
            return int(highest)

        return agreed


class Ring:
    """Detects dead ranks. Each rank waits, in a thread, for a message from the one before it: that it leaves,
    or which rank is gone; if that rank itself dies, the wait fails. Each passes the news on to the rank after
    it, so all know at once.

    Built by all ranks together. lost: called in that thread with the rank that is gone, and whether this rank
    is the one that noticed.
    """

    def __init__(self, world: World, lost: Callable[[int, bool], None]) -> None:
        self._thread: threading.Thread | None = None
        if world.world_size == 1:
            return
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._before = (world.rank - 1) % world.world_size
        self._behind = (world.rank + 1) % world.world_size
        self._lost = lost
        self._thread = threading.Thread(target=self._listen, name="ring", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Leave the ring, before the process group is closed: no rank is reported as gone from now on. A
        collective."""
        if self._thread is not None:
            self._send(_LEFT)
            self._thread.join()

    def _listen(self) -> None:
        word = torch.tensor([_LEFT])
        try:
            work = dist.irecv(word, self._before, group=self._group)
            assert work is not None, "this rank is in the group"
            work.wait(_FOR_EVER)
            noticed, gone = False, int(word) - 1
        except RuntimeError:  # the connection was closed
            noticed, gone = True, self._before
        if gone < 0:
            return
        if gone != self._behind:
            with contextlib.suppress(RuntimeError):  # that one is gone too
                self._send(1 + gone)
        self._lost(gone, noticed)

    def _send(self, word: int) -> None:
        dist.send(torch.tensor([word]), self._behind, group=self._group)
