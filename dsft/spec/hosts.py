"""What may stand as a host: an RFC 1123 name, or an IPv4 or IPv6 address. Pure; asks no name service."""

from __future__ import annotations

import ipaddress
import re

_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")


def is_host(name: str) -> bool:
    """A last label of digits alone would be half an address (RFC 1123, section 2.1), so it is none."""
    if ":" in name:
        return "%" not in name and _is_address(name)
    labels = name.split(".")
    if labels[-1].isdigit() and len(labels) > 1:
        return _is_address(name)
    return len(name) <= 253 and all(_LABEL.fullmatch(label) for label in labels) and not name.isdigit()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
