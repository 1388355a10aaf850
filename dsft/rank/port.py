"""Check that rank 0's port is free, and name what chooses another port if it is not. Without torch."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping

from dsft.errors import WorldError
from dsft.rank.environment import AGENT
from dsft.rank.launched import Launched


def check_port(launched: Launched, environ: Mapping[str, str]) -> None:
    """Raise WorldError on rank 0 if another program listens at its port. Called in the first second, before
    other ranks connect to that program, which may be another run.

    Under torchrun nothing is checked: there torchrun listens at the port, not rank 0.
    """
    if launched.rank != 0 or launched.launcher == "torchrun":
        return
    with socket.socket() as probe:
        # Same option as torch's TCPStore. No listen(), so that no rank takes this socket for rank 0's.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", launched.master_port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise port_taken(launched, environ) from None


def port_taken(launched: Launched, environ: Mapping[str, str]) -> WorldError:
    """Return the error, which names what chooses the port: the launcher's flag, or a variable."""
    if environ.get(AGENT):
        way = "unset MASTER_PORT, so that dsft launch finds a free one, or start again"
    elif launched.launcher in ("deepspeed", "torchrun"):
        way = f"give {launched.launcher} another one (--master_port N)"
    elif launched.launcher == "python":
        way = "start again, which finds a free one"
    else:
        way = "set MASTER_PORT to another one, for every rank"
    return WorldError(
        f"port {launched.master_port}, at which rank 0 is to listen for the others, is taken by another "
        f"program on {socket.gethostname()}, perhaps another run; {way}."
    )
