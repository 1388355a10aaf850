import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dsft.spec.document import SpecDumper, dotted, parse_yaml, quote, read_document


@pytest.mark.parametrize(("text", "value"), [
    ("1e-5", 1e-5),
    ("5E3", 5000.0),
    (".5", 0.5),
    ("1.", 1.0),
    ("-3", -3),
    ("010", 10),
    ("0x1F", 31),
    ("0o17", 15),
    ("true", True),
    ("False", False),
    ("~", None),
    ("", None),
    ("yes", "yes"),
    ("on", "on"),
    ("NO", "NO"),
    ("1_000", "1_000"),
    ("12:30:00", "12:30:00"),
    ("2001-01-01", "2001-01-01"),
    (".inf", ".inf"),
    ("'1'", "1"),
    ("1.2.3.4", "1.2.3.4"),
])  # fmt: skip
def test_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    data = read_document(f"key: {text}").data["key"]
    assert data == value and type(data) is type(value)


def test_every_entry_has_its_line() -> None:
    document = read_document("a: 1\nb:\n  c: 2\n  d:\n    - 3\n    - e: 4\n")
    lines = {dotted(path): location.line for path, location in document.locations.items()}
    assert lines == {"a": 1, "b": 2, "b.c": 3, "b.d": 4, "b.d.0": 5, "b.d.1": 6, "b.d.1.e": 6}


def test_the_first_of_two_equal_keys_is_kept_and_the_second_is_reported() -> None:
    document = read_document("a: {x: 1}\nb: 2\na: 3\n")
    assert document.data == {"a": {"x": 1}, "b": 2}
    assert [str(problem) for problem in document.problems] == [
        "line 3, a: this key is given twice, first on line 1; keep one of them"
    ]


def test_an_alias_is_followed() -> None:
    assert read_document("a: &x [1]\nb: *x\n").data == {"a": [1], "b": [1]}


@pytest.mark.parametrize(("text", "message"), [
    *((text, "values are nested more than 40 levels deep; write fewer levels")
      for text in ("a: &x [1, *x]", "[" * 5000, "a: " + "[" * 50 + "]" * 50)),
    ("a: [" + "1, " * 300_000 + "1]",
     "there are more than 20000 values, counting those of aliases each time; write fewer"),
], ids=range(4))  # fmt: skip
def test_what_never_ends_ends(text: str, message: str) -> None:
    assert [problem.message for problem in read_document(text).problems] == [message]


@given(st.text())
def test_no_text_makes_the_reader_fail(text: str) -> None:
    document = read_document(text)
    assert document.problems or isinstance(document.data, (dict, list, str, int, float, type(None)))


plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
)
texts = st.text() | st.sampled_from(
    ["1e-5", "on", "0o7", "null", "true", "1.", "=", "<<", "~", "", "0x1", "a: b", "# c"]
)
values = st.recursive(
    plain | texts, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=20
)


@given(values)
def test_what_is_written_is_read_back(value: Any) -> None:
    text = yaml.dump({"key": value}, Dumper=SpecDumper, allow_unicode=True)
    document = read_document(text)
    assert not document.problems
    assert document.data == {"key": value}


@given(st.text())
def test_no_shown_text_can_drive_a_terminal(text: str) -> None:
    assert quote(text).isprintable()
    assert dotted((text,)).isprintable()


def bomb(levels: int, merge: bool = False) -> str:
    """Return a YAML text of aliases whose values double with each level."""
    key = "<<: " if merge else ""
    first = "a0: &a0 {k: v}" if merge else "a0: &a0 [x, x]"
    lines = [f"a{i}: &a{i} {{{key or 'k: '}[*a{i - 1}, *a{i - 1}]}}" for i in range(1, levels)]
    return "\n".join([first, *lines])


@pytest.mark.parametrize(("text", "reason"), [
    (bomb(30), "there are more than 20000 values"),
    (bomb(30, merge=True), "there are more than 20000 values"),
    ("a: &a {b: *a}", "values are nested more than 40 levels deep"),
    ("[" * 5_000, "values are nested more than 40 levels deep"),
    ("a: !!python/name:os.system x", "line 1: the tag 'tag:yaml.org,2002:python/name:os.system'"),
    ("a: !!int ''", "line 1: the tag 'tag:yaml.org,2002:int' is not allowed"),
    ("a: 2026-13-01", "month must be in 1..12"),
    ("a: [", "expected the node content"),
])  # fmt: skip
def test_yaml_of_other_programs_has_limits(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        parse_yaml(text)


def test_yaml_of_other_programs_is_yaml_1_1() -> None:
    text = "a: &a {lr: 1e-5, on: yes}\nb: {<<: *a, lr: 0x10}\n"
    assert parse_yaml(text) == {"a": {"lr": "1e-5", True: True}, "b": {"lr": 16, True: True}}
    assert parse_yaml("") is None
