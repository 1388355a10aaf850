"""How a program of dsft's is started on a host: as itself where the host is this machine, through `ssh` where
it is another. Takes host names, gives argument vectors; starts nothing.

Nothing of the user's stands in the line that ssh hands to the other host's shell but the code's folder and
the interpreter, quoted: what the program is to do goes through its standard input, where no `ps` shows it.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from dsft.errors import WorldError
from dsft.spec.hosts import is_host

ROOT = Path(__file__).resolve().parent.parent.parent
"""The folder that holds the package `dsft`: the same path on every host."""

SSH_ARGS = "DSFT_SSH_ARGS"
"""Further options of ssh, as a shell reads them, such as `-F lab_config -p 2222`. Where it is not set,
PDSH_SSH_ARGS_APPEND, which DeepSpeed's users know, is read."""

CONNECT = 5  # seconds that a host may take to answer


def is_this_machine(host: str) -> bool:
    """By its name, or by an address that one of this machine's interfaces has. Asks the name service."""
    if host == "localhost" or host in {socket.gethostname(), socket.gethostname().partition(".")[0]}:
        return True
    try:
        found = {str(place[4][0]) for place in socket.getaddrinfo(host, None)}
    except OSError:  # unknown: whoever reaches for it tells
        return False
    own = {address.address.partition("%")[0] for each in psutil.net_if_addrs().values() for address in each}
    return all(address in own or address.startswith("127.") for address in found)


def module_command(host: str, module: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The argument vector of `python -m module` on the host, in the folder ROOT.

    Raises WorldError for what is no host name: ssh would read `-o…` as an option, and a shell `$(…)`.
    """
    if not is_host(host):
        raise WorldError(
            f"{host!r} is neither a host name (letters, digits, '-' and '.') nor an IP address; correct it."
        )
    program = [sys.executable, "-m", module]
    if is_this_machine(host):
        return program
    line = f"cd {shlex.quote(str(ROOT))} && exec {shlex.join(program)}"
    return [*ssh_command(environ), "--", host, line]


def ssh_command(environ: Mapping[str, str] = os.environ) -> Sequence[str]:
    """`ssh` with its options: it asks for nothing, gives up soon, and notices a peer that is gone. Raises
    WorldError for further ones that a shell could not read."""
    name = SSH_ARGS if environ.get(SSH_ARGS) else "PDSH_SSH_ARGS_APPEND"
    try:
        further = shlex.split(environ.get(name) or "")
    except ValueError as error:
        raise WorldError(
            f"{name}={environ[name]!r} is no list of options ({error}); mend its quotes."
        ) from None
    options = ("BatchMode=yes", f"ConnectTimeout={CONNECT}", "ServerAliveInterval=5", "ServerAliveCountMax=3")
    return ["ssh", "-T", *(word for option in options for word in ("-o", option)), *further]
