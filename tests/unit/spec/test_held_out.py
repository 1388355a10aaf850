from __future__ import annotations

from dsft.spec.held_out import set_names
from dsft.spec.schema import Source


def test_a_set_that_stands_alone_has_a_name_only_where_it_is_given_one() -> None:
    assert set_names(()) == ()
    assert set_names((Source(path="a.jsonl"),)) == (None,)
    assert set_names((Source(path="a.jsonl", name="b"),)) == ("b",)


def test_sets_are_named_by_their_files_as_metrics_can_be() -> None:
    sources = (
        Source(path="x/held out.v2.jsonl"),
        Source(path="builtin:quickstart-heldout"),
        Source(path="x/y.json", name="z"),
    )
    assert set_names(sources) == ("held_out.v2", "quickstart-heldout", "z")
