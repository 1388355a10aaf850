"""The interface that leads to another host, asked of this machine's own routes."""

import pytest

from dsft.rank import route
from dsft.rank.places import CPU, RankPlace
from dsft.rank.route import address_towards, interface_of, interface_towards


def test_this_machine() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1" and interface_of("127.0.0.1") == "lo"
    assert address_towards("no.such.host.invalid") is None and interface_of("192.0.2.1") is None


def at(machine: str, address: str | None) -> RankPlace:
    return RankPlace(machine, machine, 0, CPU, address)


@pytest.mark.parametrize(("addresses", "rank", "asked"), [
    (["10.0.0.1", "10.0.0.2"], 0, "10.0.0.1"),
    (["10.0.0.1", "10.0.0.2"], 1, "10.0.0.2"),
    (["127.0.0.1", "10.0.0.2"], 0, "towards 10.0.0.2"),  # 127.0.1.1 of Debian's /etc/hosts
    (["127.0.0.1", "10.0.0.2"], 1, "10.0.0.2"),
    (["127.0.0.1", "127.0.0.1"], 0, None),
    ([None, "10.0.0.2"], 0, "towards 10.0.0.2"),
])  # fmt: skip
def test_between_hosts(
    addresses: list[str | None], rank: int, asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "address_towards", lambda host: f"towards {host}")
    monkeypatch.setattr(route, "interface_of", lambda address: f"of {address}")
    places = [at(f"node{number}", address) for number, address in enumerate(addresses)]
    assert interface_towards(places, rank) == (f"of {asked}" if asked else None)


def test_one_host_needs_none() -> None:
    assert interface_towards([at("node", "10.0.0.1")] * 2, 0) is None
