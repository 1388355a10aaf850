"""What failed first, what follows from it, and the exit code."""

import pytest

from dsft.launcher.verdict import (
    Failure,
    RankActivity,
    error_in,
    exit_code,
    first_cause,
    hang_message,
    hung_ranks,
    is_consequence,
    may_succeed,
    shell_code,
    shown_lines,
)

PEER = Failure("rank", "one", 1, "RuntimeError: [gloo/pair.cc:547] Connection closed by peer [10.0.0.2]:1", 0)
NCCL = Failure("rank", "one", 1, "ncclRemoteError: A call failed possibly due to a network error", 0)
KILLED = Failure("rank", "two", 137, None, 1, 7)
RAISED = Failure("rank", "two", 65, "rows.jsonl:7: no such column", 1)
LOST = Failure("host", "two", None, "has sent no heartbeat for 15 seconds")
HUNG = Failure("hang", "two", None, "has sent no heartbeat for 60 seconds", 1, 7)
ENDED = Failure("rank", "one", 143, None, 0)


@pytest.mark.parametrize(("failures", "first", "code"), [
    ((PEER, KILLED), KILLED, 137),
    ((NCCL, PEER, RAISED), RAISED, 65),
    ((PEER, LOST), LOST, 69),
    ((ENDED, KILLED), KILLED, 137),
    ((PEER,), PEER, 1),
    ((PEER, HUNG, LOST), HUNG, 124),
    ((), None, 0),
])  # fmt: skip
def test_first_cause(failures: tuple[Failure, ...], first: Failure | None, code: int) -> None:
    assert first_cause(failures) is first
    assert exit_code(first) == code


@pytest.mark.parametrize(("code", "shell"), [(-9, 137), (1, 1), (75, 75), (-15, 143), (0, 0)])
def test_shell_code(code: int, shell: int) -> None:
    assert shell_code(code) == shell


def test_may_succeed() -> None:
    assert all(may_succeed(each, exit_code(each)) for each in (KILLED, LOST, HUNG, PEER))
    assert not may_succeed(RAISED, 65)
    assert not may_succeed(Failure("rank", "one", 69, "cluster.hosts expects 4 processes"), 69)


@pytest.mark.parametrize(("lines", "error"), [
    (["x", "error: rank 1: out of memory", "bye"], "rank 1: out of memory"),
    (["Traceback (most recent call last):", '  File "a", line 1', "    f()", "KeyError: 'x'"],
     "KeyError: 'x'"),
    (["[rank1]: Traceback (most recent call last):", "[rank1]:   File", "[rank1]: OSError: no"],
     "OSError: no"),
    (["step 1", "step 2"], None),
    (["Traceback (most recent call last):"], None),
])  # fmt: skip
def test_error_in(lines: list[str], error: str | None) -> None:
    assert error_in(lines) == error


def test_error_printed_at_the_end_is_left_out() -> None:
    message = "The spec is wrong.\n  line 3: a\n  line 4: b"
    lines = ["--- rank 1 of 2", "x", "error: rank 1: The spec is wrong.", "  line 3: a", "  line 4: b", "y"]
    assert shown_lines(lines, message) == ["x", "y"]
    assert shown_lines(lines, "another") == shown_lines(lines, None) == lines[1:]


@pytest.mark.parametrize("text", [
    "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d store: TCPStore",
    "DistBackendError: NCCL error: remote process exited or there was a network error",
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection reset by peer",
    "BrokenPipeError: [Errno 32] Broken pipe",
])  # fmt: skip
def test_consequences(text: str) -> None:
    assert is_consequence(text)
    assert not is_consequence("OutOfMemoryError: CUDA out of memory")


def test_hung_ranks() -> None:
    def seen(rank: int, step: int, silent: float, idle: float, phase: str = "step") -> RankActivity:
        return RankActivity(rank, "one", step, phase, silent, idle)

    waiting, stopped = seen(0, 9, 0.2, 70), seen(1, 8, 70, 70)
    assert hung_ranks([waiting, stopped], 60) == [stopped]
    behind = seen(1, 8, 0.1, 65)
    assert hung_ranks([waiting, behind], 60) == [behind]  # the other one waits for it
    assert hung_ranks([waiting, seen(1, 9, 0.1, 3)], 60) == [waiting]
    assert hung_ranks([seen(0, 9, 0.2, 700, "export"), seen(1, 0, 0.2, 700, "load")], 60) == []


def test_silent_rank_is_named_before_one_that_waits_for_it() -> None:
    """Rank 0 stopped, rank 1 over the limit first, since the last heartbeat of rank 0 was a second old."""
    waiting, stopped = (
        RankActivity(1, "two", 24, "step", 0.3, 5.4),
        RankActivity(0, "one", 24, "step", 4.4, 4.9),
    )
    assert hung_ranks([waiting, stopped], 5) == [stopped]
    expected = "has sent no heartbeat for 4 seconds, and others have made no progress for longer"
    assert hang_message([stopped], 5) == f"{expected} (cluster.hang_timeout 5); its phase was step"
    assert hung_ranks([stopped], 5) == []
    assert (
        hung_ranks(
            [RankActivity(1, "two", 24, "step", 0.3, 700), RankActivity(0, "one", 24, "step", 12, 300)],
            600,
        )[0].rank
        == 0
    )
    late = RankActivity(0, "one", 24, "step", 1.9, 6)
    assert hung_ranks([waiting, late], 5) == [waiting, late]
