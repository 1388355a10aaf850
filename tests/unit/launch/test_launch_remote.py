"""Programs on other hosts: by argument vector, ssh given host names alone."""

from __future__ import annotations

import shlex
import socket
import sys

import pytest

from dsft.errors import WorldError
from dsft.launch.remote import ROOT, is_this_machine, module_command


def test_this_machine_is_known_by_name_and_by_address() -> None:
    for host in ("localhost", "127.0.0.1", socket.gethostname()):
        assert is_this_machine(host)
        assert module_command(host, "dsft.cli") == [sys.executable, "-m", "dsft.cli"]
    assert not is_this_machine("192.0.2.1")  # RFC 5737: nobody's
    assert not is_this_machine("no-such-host.invalid")


def test_another_machine_is_reached_through_ssh_with_nothing_of_the_users_in_the_line() -> None:
    argv = module_command("192.0.2.1", "dsft.cli", {"DSFT_SSH_ARGS": "-F 'my config' -p 22"})
    assert argv[0] == "ssh" and argv[-3:-1] == ["--", "192.0.2.1"]
    assert argv[-7:-3] == ["-F", "my config", "-p", "22"]
    assert shlex.split(argv[-1]) == ["cd", str(ROOT), "&&", "exec", sys.executable, "-m", "dsft.cli"]
    assert "BatchMode=yes" in argv
    assert module_command("192.0.2.1", "dsft.cli", {"PDSH_SSH_ARGS_APPEND": "-p 9"})[-5:-3] == ["-p", "9"]


@pytest.mark.parametrize("host", ["-oProxyCommand=x", "a;id", "$(id)", "a b", "", "a\nb", "user@node1"])
def test_what_is_no_host_name_is_refused(host: str) -> None:
    with pytest.raises(WorldError, match="neither a host name"):
        module_command(host, "dsft.cli")


def test_options_that_no_shell_could_read_are_refused_by_their_variable() -> None:
    for name in ("DSFT_SSH_ARGS", "PDSH_SSH_ARGS_APPEND"):
        with pytest.raises(WorldError, match=f"{name}=.* is no list of options"):
            module_command("192.0.2.1", "dsft.cli", {name: "-o 'x"})
