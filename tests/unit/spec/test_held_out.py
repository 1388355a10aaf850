from typing import Any

from dsft.spec.held_out import set_names, split_sets
from dsft.spec.schema import Data, Source


def data(*held_out: Source, train: tuple[Source, ...] = (Source(path="t.jsonl"),), **keys: Any) -> Data:
    return Data(train=train, eval=held_out, **keys)


def test_a_single_set_has_a_name_only_where_it_is_given_one() -> None:
    assert set_names(data()) == ()
    assert set_names(data(Source(path="a.jsonl"))) == (None,)
    assert set_names(data(Source(path="a.jsonl", name="b"))) == ("b",)


def test_sets_are_named_by_their_files_as_metrics_can_be() -> None:
    sources = (
        Source(path="x/held out.v2.jsonl"),
        Source(path="builtin:quickstart-heldout"),
        Source(path="x/y.json", name="z"),
    )
    assert set_names(data(*sources)) == ("held_out.v2", "quickstart-heldout", "z")


def test_rows_held_out_of_named_sources_are_sets_of_their_own() -> None:
    named, other = Source(path="a.jsonl", name="web"), Source(path="b.jsonl")
    assert split_sets(data()) == ()
    assert split_sets(data(eval_fraction=0.1)) == ((None, (0,)),)
    assert split_sets(data(train=(named,), eval_count=3)) == (("web", (0,)),)
    assert split_sets(data(train=(other, named, other), eval_count=3)) == (
        ("web", (1,)),
        ("held_out", (0, 2)),
    )


def test_a_file_beside_rows_held_out_has_a_name() -> None:
    both = data(Source(path="a.jsonl"), eval_fraction=0.1)
    assert (set_names(both), split_sets(both)) == (("a",), (("held_out", (0,)),))
