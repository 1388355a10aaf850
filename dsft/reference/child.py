"""A process that scores for the process that started it: gets a Pass over a socket, says how it goes on.

    python -m dsft.reference.child DESCRIPTOR PARENT    the socket it inherited, who started it

Its place in the group stands in the environment, as a launcher leaves it.
"""

from __future__ import annotations

import sys

from dsft.system.process import die_with, end


def main(descriptor: int, parent: int) -> int:
    """The exit code: 0, or 1 after an error that the parent was told."""
    die_with(parent)
    from dsft.reference.children import work  # torch and deepspeed are imported from here on

    return work(descriptor)


if __name__ == "__main__":
    end(main(int(sys.argv[1]), int(sys.argv[2])))
