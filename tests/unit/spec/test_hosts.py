import ipaddress
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsft.spec.hosts import is_host

label = st.from_regex(r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,20}[a-zA-Z0-9])?", fullmatch=True)
last_label = label.filter(lambda text: not text.isdigit())


@given(st.lists(label, max_size=4), last_label)
def test_names_are_taken(labels: list[str], last: str) -> None:
    assert is_host(".".join([*labels, last]))


@given(st.ip_addresses())
def test_addresses_are_taken(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    assert is_host(str(address))


@given(st.text())
def test_nothing_taken_can_be_an_option_a_path_or_a_command(text: str) -> None:
    if is_host(text):
        assert re.fullmatch(r"[A-Za-z0-9:][A-Za-z0-9.:-]*", text)


@pytest.mark.parametrize(
    "host",
    [
        "", "-a", "a-", "a_b", "a,b", "a b", "a;b", "nöde", "１.1.1.1", "a..b", ".a", "a.", "1.2.3",
        "1.2.3.256", "01.2.3.4",
    ]
    + [
        "fe80::1%eth0", "[::1]", "::1::", "user@a", "a:22", "node[1-4]", "a\n", "12", "a" * 64,
        "a." * 126 + "ab",
    ],
)  # fmt: skip
def test_what_is_no_host(host: str) -> None:
    assert not is_host(host)
