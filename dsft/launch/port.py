"""The port at which rank 0 listens for the other ranks, where another program has it: takes a rank's place
and its environment, says what chooses another port. Without torch."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping

from dsft.errors import WorldError
from dsft.launch.environment import AGENT
from dsft.launch.launched import Launched


def check_port(launched: Launched, environ: Mapping[str, str]) -> None:
    """Raises WorldError on rank 0 where another program listens at its port: in the first second, before the
    other ranks can meet that program, which may be another run.

    Under torchrun it is torchrun that listens there, and rank 0 does not.
    """
    if launched.rank != 0 or launched.launcher == "torchrun":
        return
    with socket.socket() as probe:
        # As torch's TCPStore sets it. Without listen(), so that no rank takes this socket for rank 0's.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", launched.master_port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise port_taken(launched, environ) from None


def port_taken(launched: Launched, environ: Mapping[str, str]) -> WorldError:
    """The error that names what chooses the port: the launcher's flag, or a variable."""
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
