from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsft.spec.document import Document, dotted, read_document
from dsft.spec.overrides import apply_overrides, parse_path


def overridden(text: str, *overrides: str) -> Any:
    document = read_document(text)
    apply_overrides(document, overrides)
    assert not document.problems, document.problems
    return document.data


@pytest.mark.parametrize(("text", "path"), [
    ("name", ("name",)),
    ("train.max_steps", ("train", "max_steps")),
    ("data.train.0.path", ("data", "train", 0, "path")),
    ('cluster.hosts."10.77.0.1"', ("cluster", "hosts", "10.77.0.1")),
    ("cluster.hosts.'10.77.0.1'", ("cluster", "hosts", "10.77.0.1")),
    ("cluster.hosts.10.77.0.1", ("cluster", "hosts", "10.77.0.1")),  # the shell took the quotes
    ("cluster.hosts.node1.lan", ("cluster", "hosts", "node1.lan")),
    ("cluster.hosts.fe80::1", ("cluster", "hosts", "fe80::1")),
    ("data.train.0.columns.a.b", ("data", "train", 0, "columns", "a.b")),
    ("model.from_config.rope_parameters.factor", ("model", "from_config", "rope_parameters", "factor")),
])  # fmt: skip
def test_paths(text: str, path: tuple[str | int, ...]) -> None:
    assert parse_path(text) == path


@pytest.mark.parametrize("text", ["", ".", "a.", ".a", "a..b", '"a', 'a"b"', '""', "a.''", '"a"b', " "])
def test_what_is_no_path(text: str) -> None:
    assert parse_path(text) is None


@given(
    st.lists(
        st.text(st.characters(exclude_characters="\"'\\", categories=("L", "N", "P")), min_size=1), min_size=1
    )
)
def test_a_shown_path_is_read_back(parts: list[str]) -> None:
    path = tuple(["x", *(f"{part}." for part in parts)])  # the dot keeps digits a text
    assert parse_path(dotted(path)) == path


@given(st.text())
def test_no_override_makes_the_parser_fail(text: str) -> None:
    document = Document(data={"a": [1], "b": {"c": 2}})
    apply_overrides(document, [text, f"a={text}", f"b.{text}=1"])


@pytest.mark.parametrize(("override", "value"), [
    ("a.b=2", {"a": {"b": 2, "c": [1, {"d": 3}]}}),
    ("a.b==x=y", {"a": {"b": "=x=y", "c": [1, {"d": 3}]}}),
    ("a.b=", {"a": {"b": None, "c": [1, {"d": 3}]}}),
    ("a={x: 1e-5}", {"a": {"x": 1e-5}}),
    ("a.c.1.d=on", {"a": {"b": 1, "c": [1, {"d": "on"}]}}),
    ("a.c.2=new", {"a": {"b": 1, "c": [1, {"d": 3}, "new"]}}),
    ("a.c.2.e=new", {"a": {"b": 1, "c": [1, {"d": 3}, {"e": "new"}]}}),
    ("n.o.0.p=1", {"a": {"b": 1, "c": [1, {"d": 3}]}, "n": {"o": [{"p": 1}]}}),
])  # fmt: skip
def test_what_an_override_does(override: str, value: Any) -> None:
    assert overridden("a: {b: 1, c: [1, {d: 3}]}", override) == value


def test_a_later_override_wins_and_an_empty_file_can_be_filled() -> None:
    assert overridden("", "a.b=1", "a.b=2", "a.c=3") == {"a": {"b": 2, "c": 3}}


def test_a_value_that_was_replaced_is_named_by_its_override() -> None:
    document = read_document("a:\n  b: 1\n")
    apply_overrides(document, ["a={b: x}"])
    assert str(document.problem(("a", "b"), "wrong")) == "override 'a={b: x}': a.b: wrong"
