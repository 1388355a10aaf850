"""How a pass's children are heard out, without any child: by what they would say."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing import Pipe
from typing import Any

import pytest

from dsft.errors import CheckpointError, DsftError, OutOfMemoryError, WorldError
from dsft.launch.environment import Launched, detect
from dsft.reference import children
from dsft.reference.children import End, _attend, _Child, _environment
from dsft.reference.passes import Pace


class Child(_Child):
    """As its parent sees one that says `words`, and then goes on or breaks off."""

    def __init__(self, rank: int, words: Sequence[Any], *, breaks_off: int | None = None) -> None:
        self.connection, self.theirs = Pipe()
        self._rank, self.ended = rank, None
        for word in words:
            self.theirs.send(word)
        if breaks_off is not None:
            self.theirs.close()
        self._process: Any = type("Process", (), {"wait": lambda process: breaks_off})()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_TICK", 0.01)


def attend(*ones: Child, told: list[Any] | None = None) -> None:
    told = [] if told is None else told
    _attend(ones, len(ones), lambda mine: [mine], told.append, told.append)


def test_all_end_well() -> None:
    told: list[Any] = []
    pace = Pace(1, 2, 10, 20)
    attend(Child(0, ["a line", pace, End(0)]), Child(1, [End(1)]), told=told)
    assert told == ["a line", pace]


def test_the_childs_own_sentence_though_another_broke_off_first() -> None:
    ones = [Child(0, [], breaks_off=-6), Child(1, [])]
    ticks = 0

    def gather(mine: Sequence[End]) -> list[Sequence[End]]:
        nonlocal ticks
        ticks += 1
        if ticks == 2:
            ones[1].theirs.send(End(1, error=CheckpointError("it says so.")))
        return [mine]

    with pytest.raises(CheckpointError, match=r"^it says so\.$"):
        _attend(ones, 2, gather, print, print)


def test_an_error_of_one_rank_is_told_once() -> None:
    with pytest.raises(OutOfMemoryError) as raised:
        attend(Child(0, []), Child(1, [End(1, error=OutOfMemoryError("full"))]))
    assert not raised.value.of_one_rank and OutOfMemoryError.of_one_rank


@pytest.mark.parametrize("code, said", [(-9, "signal 9, as a machine does whose memory"), (3, "exit code 3")])
def test_one_without_a_word(code: int, said: str) -> None:
    with pytest.raises(WorldError, match=f"rank 1 .* {said}.*goes on from there"):
        attend(Child(0, []), Child(1, [], breaks_off=code))


@pytest.mark.parametrize("code, said", [(-9, "rank 1 .* signal 9"), (-6, "Traceback"), (1, "Traceback")])
def test_the_cause_is_told_and_not_what_follows_from_it(code: int, said: str) -> None:
    """A killed process makes the others' collectives fail; one that fails makes others abort."""
    with pytest.raises((WorldError, RuntimeError), match=said):
        attend(
            Child(0, [End(0, fault="Traceback: connection closed by peer")]), Child(1, [], breaks_off=code)
        )


def test_a_fault_of_dsft_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="rank 0 of the reference's processes:\nTraceback") as raised:
        attend(Child(0, [End(0, fault="Traceback of it")]))
    assert not isinstance(raised.value, DsftError)


def test_ends_on_other_hosts_count() -> None:
    others = iter([[], [End(1)]])
    _attend([Child(0, [End(0)])], 2, lambda mine: [mine, next(others)], print, print)
    with pytest.raises(CheckpointError):
        failed = [End(1, error=CheckpointError("there"))]
        _attend([Child(0, [])], 2, lambda mine: [mine, failed], print, print)


def test_a_child_has_a_place_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("MASTER_PORT", "1")
    task = dict(SLURM_STEP_ID="0", SLURM_PROCID="0", SLURM_NTASKS="1", SLURM_LOCALID="0", NNODES="1")
    for name, value in task.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    own = _environment(Launched("torchrun", 3, 4, 1, "host-0", 2345))
    assert not [name for name in own if name.startswith("TORCHELASTIC")]
    assert detect(own).rank == 3, "the task around it has another place"
    assert (own["RANK"], own["WORLD_SIZE"], own["LOCAL_RANK"]) == ("3", "4", "1")
    assert (own["MASTER_ADDR"], own["MASTER_PORT"], own["DS_ACCELERATOR"]) == ("host-0", "2345", "cpu")
