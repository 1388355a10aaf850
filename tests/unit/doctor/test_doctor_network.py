"""How links are judged and printed, from figures made by hand; and one measurement on this machine."""

import random
from collections.abc import Mapping

import pytest

from dsft.doctor.links import AllReduce, Link, Network, judged, network_lines, network_of
from dsft.errors import WorldError
from dsft.launcher.attempt import Attempt
from dsft.launcher.network import measure
from dsft.launcher.verdict import Outcome

REDUCES = (AllReduce(4, 0.0005, 0.0001), AllReduce(1 << 20, 0.001, 8.39))


def network(speeds: Mapping[tuple[str, str], float], seconds: float = 1e-4) -> Network:
    """speeds: (sender, receiver) -> Gbit/s."""
    links = tuple(Link(*ends, seconds, gbit) for ends, gbit in speeds.items())
    return Network(tuple(sorted({ends[0] for ends in speeds})), links, REDUCES, "gloo", 2)


def all_of(names: str, gbit: float = 10.0) -> dict[tuple[str, str], float]:
    return {(one, other): gbit for one in names for other in names if one != other}


def warned(found: Network, expected: float | None = None) -> list[str]:
    return [each.value for each in judged(found, expected) if each.level == "warning"]


def test_healthy_network() -> None:
    links, reduced = judged(network(all_of("abcd")), None)
    assert (links.level, reduced.level) == ("pass", "pass")
    assert links.value == "12 directions, 10 to 10 Gbit/s, 0.1 to 0.1 ms for a message"
    assert reduced.value == "gloo, 2 processes: 500 µs for 4 bytes, 8.39 Gbit/s on the bus for 1 MiB"


def test_noise_is_not_reported() -> None:
    draw = random.Random(1)
    assert warned(network({pair: 10.0 * draw.uniform(0.7, 1.3) for pair in all_of("abcdefgh")})) == []


@pytest.mark.parametrize("names", ["ab", "abc", "abcdefgh"])
def test_slow_direction_is_reported(names: str) -> None:
    expected = ["a → b: 4.9 Gbit/s, less than half of the fastest link's 10"]
    assert warned(network(all_of(names) | {("a", "b"): 4.9})) == expected


def test_expected_speed() -> None:
    found = network({("a", "b"): 20.0, ("b", "a"): 30.0})
    assert warned(found) == []
    assert warned(found, 25.0) == ["a → b: 20 Gbit/s, less than the 25 expected"]


def test_far_hosts_are_reported() -> None:
    assert warned(network(all_of("ab"), seconds=0.02)) == [
        "a → b: 20 ms for a message of 4 bytes", "b → a: 20 ms for a message of 4 bytes",
    ]  # fmt: skip


def test_tables() -> None:
    assert list(network_lines(network({("a", "b"): 9.41, ("b", "a"): 9.5}))) == [
        "Gbit/s (ms for 4 bytes)  → a        → b",
        "a                                   9.41 (0.1)",
        "b                        9.5 (0.1)",
        "all-reduce over gloo, 2 processes",
        "       bytes        time  bus Gbit/s",
        "           4      500 µs      0.0001",
        "   1,048,576    1,000 µs        8.39",
    ]
    many = network({pair: float(ord(pair[0])) for pair in all_of("abcdefghijklmnopqrst")})
    lines = list(network_lines(many))
    assert lines[0] == "Gbit/s (ms for 4 bytes), the 12 slowest of 380 directions"
    assert lines[1].startswith("a → ") and lines[1].endswith(": 97 (0.1)") and len(lines) == 13 + 4


@pytest.mark.long  # tests/lab/test_network.py always measures between two hosts
def test_measurement_on_this_machine() -> None:
    """127.0.0.2 is this machine too, to Linux: agents, ranks and sockets are real."""
    found = measure({"127.0.0.1": 1, "127.0.0.2": 2}, {"DS_ACCELERATOR": "cpu"}, None, "ssh")
    measured = network_of(["one", "two"], found)
    assert (measured.backend, measured.processes) == ("gloo", 3)
    assert {(link.sender, link.receiver) for link in measured.links} == {("one", "two"), ("two", "one")}
    assert all(0 < link.seconds < 1 and link.gbit > 0 for link in measured.links)
    assert measured.reduces[0].bytes == 4
    for each in measured.reduces:
        assert each.bus_gbit == pytest.approx(4 / 3 * each.bytes * 8e-9 / each.seconds)


def test_ranks_without_a_result_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(attempt: Attempt) -> Outcome:
        attempt.log("a line of another program")
        return Outcome(0, None, (), 1.0)

    monkeypatch.setattr(Attempt, "run", run)
    with pytest.raises(WorldError, match="the ranks have ended without a result"):
        measure({"127.0.0.1": 2}, {"DS_ACCELERATOR": "cpu"}, None, "ssh")


@pytest.mark.long  # test_ranks_without_a_result_are_one_error always tries that its error is raised
def test_failed_measurement_is_one_error() -> None:
    with pytest.raises(WorldError, match=r"rank \d on 127.0.0.1: .*nowhere"):
        measure({"127.0.0.1": 2}, {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "nowhere"}, None, "ssh")
