"""Arguments that run a command wherever a shell, or ssh, takes them for more than text. Strategies of
hypothesis."""

import os
from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st

# HIT becomes `touch …/canary`: whoever runs one of these, in whatever way, leaves the file.
ATTACKS = (
    "$(HIT)", "`HIT`", "; HIT;", "& HIT &", "| HIT", "&& HIT #", "|| HIT", "\nHIT\n", "\r\nHIT", "'; HIT; '",
    '"; HIT; "', "'$(HIT)'", '"$(HIT)"', "\\$(HIT)", "$'\\n'HIT", "<(HIT)", ">(HIT)", "${x:-$(HIT)}",
    "a[$(HIT)]", "((a[$(HIT)]))", "-oProxyCommand=HIT", "-o ProxyCommand=HIT", "-lHIT", "-F HIT", "--rsh=HIT",
    "@all", "*", "~", "%h", "$IFS", "${PATH}", "!!", "{a,b}", "\x1b[2J", "\x7f", "é\u202e", "\udcff",
)  # fmt: skip


def armed(texts: Sequence[str], folder: Path) -> list[str]:
    """With the canary in `folder`, which must not be there at the end."""
    return [text.replace("HIT", f"touch {folder}/canary") for text in texts]


# What an argument of a process can be: any bytes but NUL.
plain = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
raw = st.binary(max_size=8).map(lambda data: os.fsdecode(data.replace(b"\0", b"")))
argument = st.lists(st.one_of(st.sampled_from(ATTACKS), plain, raw), max_size=4).map("".join)
