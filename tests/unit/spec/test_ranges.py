import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsft.errors import SpecError
from dsft.spec.document import read_document
from dsft.spec.hosts import MOST_HOSTS, expand, expand_hosts
from dsft.spec.load import load_spec

Write = Callable[[str], Path]


@pytest.mark.parametrize(("text", "names"), [
    ("node[08-11]", "node08 node09 node10 node11"),
    ("n[8-11]", "n8 n9 n10 n11"),
    ("b[2,1],a", "b2 b1 a"),
    ("r[1-2]n[1-2].x", "r1n1.x r1n2.x r2n1.x r2n2.x"),
    ("10.0.0.[1-2]", "10.0.0.1 10.0.0.2"),
    ("n[1-9/4]", "n1 n5 n9"),
    ("fe80::1", "fe80::1"),
    ("a,a", "a a"),
])  # fmt: skip
def test_names_keep_the_order_in_which_they_were_written(text: str, names: str) -> None:
    assert expand(text) == names.split()


@pytest.mark.parametrize(("text", "reason"), [
    ("", "is not a list of hosts"),
    ("a,", "is not a list of hosts"),
    ("a b", "'a b' is neither a host name"),
    ("n[1-3", "is not a list of hosts"),
    ("n[[1]]", "is not a list of hosts"),
    ("n[]", "is not a range of numbers"),
    ("n[1-2-3]", "is not a range of numbers"),
    ("n[a-c]", "is not a range of numbers"),
    ("n[１-３]", "is not a range of numbers"),
    ("n[3-1]", "runs backwards"),
    ("n[01-2]", "runs backwards"),
    ("-o[1-2]", "'-o1' is neither a host name"),
    ("@all", "'@all' is neither"),
    ("*", "'*' is neither"),
    ("a!b", "'a!b' is neither"),
    ("n[1-999999999]", f"over {MOST_HOSTS} hosts"),
    ("n[1-999][1-999][1-999]", f"over {MOST_HOSTS} hosts"),
    ("[1-3]", "'1' is neither a host name"),
    ("$(id)[1-2]", "is neither a host name"),
])  # fmt: skip
def test_what_is_no_range_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        expand(text)


@given(st.text(st.sampled_from("abn[]-,/0123456789.:@*!^&$`;\n -"), max_size=24))
def test_whatever_is_written_gives_hosts_or_a_sentence(text: str) -> None:
    try:
        names = expand(text)
    except ValueError as error:
        assert str(error).count("\n") == 0
        return
    assert 0 < len(names) <= MOST_HOSTS
    assert all(re.fullmatch(r"[A-Za-z0-9:][A-Za-z0-9.:-]*", name) for name in names)


SPEC = """
name: x
task: sft
model: {from_config: {model_type: llama}}
data: {train: [{path: "builtin:quickstart"}]}
train: {micro_batch_size: 1, accumulation_steps: 1, max_steps: 1}
optim: {learning_rate: 1.0e-3}
cluster:
  hosts:
"""


def test_a_spec_may_have_ranges_for_keys(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(SPEC + "    node[09-11]: 8\n    head: 2\n")
    cluster = load_spec(path).cluster
    assert list(cluster.hosts.items()) == [("node09", 8), ("node10", 8), ("node11", 8), ("head", 2)]
    cluster = load_spec(path, ["cluster.hosts={'n[1-2]': 1}"]).cluster
    assert cluster is not None and cluster.hosts == {"n1": 1, "n2": 1}


def test_a_wrong_range_is_reported_with_its_line_and_with_other_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(SPEC + "    node[1-3]: 8\n    node2: 8\n    n[2-1]: 1\n    -o[1-2]: 1\n    m[1-2]: 0\n")
    with pytest.raises(SpecError) as error:
        load_spec(path)
    message = str(error.value)
    assert "line 11, cluster.hosts.node2: node2 is in both 'node[1-3]' and 'node2'" in message
    assert "line 12, " in message and "runs backwards" in message
    assert "line 13, " in message and "'-o1' is neither a host name" in message
    assert "line 14, cluster.hosts.m1" in message


def test_a_document_without_ranges_is_left_alone() -> None:
    for text in ("cluster: {hosts: {a: 1, b: 1}}", "cluster: 3", "- 1", "cluster: {hosts: [a]}", ""):
        document, same = read_document(text), read_document(text)
        expand_hosts(document)
        assert document.data == same.data and not document.problems
