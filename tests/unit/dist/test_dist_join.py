"""Joining the process group where another program has rank 0's port, which was free at the check."""

import socket

import pytest

from dsft.engine.join import join
from dsft.errors import WorldError
from dsft.rank.environment import RENDEZVOUS, Launched
from dsft.spec.layout import Layout


def test_used_port_gives_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RENDEZVOUS:  # written by `join`
        monkeypatch.setenv(name, "")
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        launched = Launched("deepspeed", 0, 2, 0, "127.0.0.1", port)
        with pytest.raises(WorldError, match=rf"port {port}, .*\(--master_port N\)\.$"):
            join(launched, Layout(2, 1))
