"""What is shown is what is trained on, whatever the rows hold: JSON, terminal and page, hostile rows too."""

import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsft.data.sets.load import load_data
from dsft.data.tokenizer.load import byte_level_tokenizer
from dsft.preview.command import page
from dsft.preview.terminal import as_text
from dsft.preview.tokens import BORDER, END_TRAINED, LINE_BREAK, TRAINED, neutral, texts_of, visible
from dsft.preview.view import PreviewData, View, as_mapping, collect, view
from tests.specs import minimal_spec
from tests.unit.preview.conftest import Preview, talk

TOKENIZER = byte_level_tokenizer()
HOSTILE = (
    "</pre></style><script>window.pwned = 1</script>",
    '<img src=x onerror="window.pwned = 1">\'><svg onload=alert(1)>',
    "a\u202eb\u2066c\u200b\u0085\x00\x1b[2J\x1b]52;c;eA==\x07\x9b31m\r\u2028\ufeff\U000e0041",
    f"{TRAINED}{END_TRAINED}{BORDER}{LINE_BREAK}⟨U+0000⟩ [red]x[/red] &amp; &#60;b&#62;",
)
SEEN: dict[str, Any] = {"rows": 99, "worst": True, "micro_batch": True, "problems": 99}


def collected(
    folder: Path, rows: Sequence[Any], name: str = "a.jsonl", task: str = "sft", **data: Any
) -> PreviewData:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = {"train": [{"path": str(folder / name)}], "max_length": 64, "on_too_long": "truncate", **data}
    train, runs = {"micro_batch_size": 4}, str(folder / "runs")
    return collect(minimal_spec(task, data=source, train=train, output_dir=runs))


def shown_texts(seen: View) -> list[str]:
    """Of each row that is shown somewhere."""
    batch = seen.micro_batch.rows if seen.micro_batch else ()
    rows = [*batch, *seen.rows, *chain(*seen.worst.values())]
    return ["".join(visible(token.text) for token in row.tokens) for row in rows]


class Reader(HTMLParser):
    """Elements with their attributes, and the text of each <pre>."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: set[tuple[str, str | None]] = set()
        self.texts: list[str] = []
        self.other = ""
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes |= {(name, re.sub(r"[\d.]+", "0", value or "")) for name, value in attrs}
        self._open.append(tag)
        if tag == "pre":
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "pre" in self._open:
            self.texts[-1] += data
        else:
            self.other += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    return reader


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """The page of rows of which none is hostile."""
    rows = [talk("q", "x" * 90), talk("a", "b\n"), talk("a", "b\n"), "bad"]
    return read(page(view(collected(tmp_path_factory.mktemp("plain"), rows), **SEEN)))


# --- any rows ---------------------------------------------------------------------------------------------


any_text = st.text(st.sampled_from("ab \n\t\0é中🙂[]<>&\"'\u202e\x1b┊⟦⟧↵\r\ufffd"), max_size=25)


@given(st.lists(st.tuples(any_text, any_text.map(lambda text: f"{text}.")), min_size=1, max_size=3))
@settings(max_examples=15, deadline=None)
def test_any_rows_are_shown_as_they_are_trained_on(
    tmp_path_factory: Any, rows: list[tuple[str, str]]
) -> None:
    found = collected(tmp_path_factory.mktemp("rows"), [talk(*row) for row in rows])
    data = load_data(found.spec, TOKENIZER, refuse=False).train  # all prompts may be cut
    seen = view(found, **SEEN)
    given = as_mapping(seen)["rows"]
    for index, row in enumerate(given):
        example = data[index]
        assert row["source"] == data.source(index)
        assert row["input_ids"] == example.input_ids.tolist() and row["trained"] == example.trained.tolist()
        assert "".join(row["tokens"]) == TOKENIZER.decode(example.input_ids.tolist())
    assert len(given) == len(data)

    text = as_text(seen, whole=True)
    for mark in (TRAINED, END_TRAINED, BORDER, "\n"):
        text = text.replace(mark, "")
    html = [shown.replace("\n", "") for shown in read(page(seen)).texts]
    for shown in shown_texts(seen):
        assert shown in text and shown in html


@given(
    st.lists(any_text.map(lambda text: f"{text}."), min_size=1, max_size=4),
    st.integers(2, 40),
    st.sampled_from([{"packing": True}, {"on_too_long": "split"}, {"on_too_long": "drop"}]),
)
@settings(max_examples=15, deadline=None)
def test_any_texts_are_shown_in_the_pieces_that_are_trained_on(
    tmp_path_factory: Any, texts: list[str], max_length: int, how: dict[str, Any]
) -> None:
    settings_of = {"on_too_long": "error", "max_length": max_length, **how}
    rows = [{"text": text} for text in texts]
    found = collected(tmp_path_factory.mktemp("texts"), rows, task="pretrain", **settings_of)
    seen = view(found, **SEEN)
    assert len(seen.rows) == len(found.train)
    for row, example in zip(seen.rows, (found.train[i] for i in range(len(found.train))), strict=True):
        assert [token.id for token in row.tokens] == example.input_ids.tolist()
        assert [token.trained for token in row.tokens] == example.trained.tolist()
        assert row.segments == example.segment_lengths and sum(row.segments) == len(row.tokens)
    assert set(shown_texts(seen)) == {
        "".join(visible(token.text) for token in row.tokens) for row in seen.rows
    }


@given(any_text)
@settings(max_examples=300)
def test_what_is_visible_is_printable_and_unlike_other_text(text: str) -> None:
    shown = visible(text)
    assert shown.isprintable()
    back = re.sub(r"⟨U\+(\w+)⟩", lambda code: chr(int(code[1], 16)), shown)
    assert back.replace(LINE_BREAK, "\n").replace("⇥", "\t").replace("␣", " ") == text.replace(
        LINE_BREAK, "\n"
    )


def test_a_character_of_several_tokens_is_shown_at_the_last() -> None:
    def texts(ids: list[int]) -> list[str]:
        return texts_of(ids, TOKENIZER)

    assert texts(list("é!".encode())) == ["", "é", "!"]
    assert texts(list("a中🙂".encode())) == ["a", "", "", "中", "", "", "", "🙂"]
    assert "".join(texts(list("中".encode())[:2])) == "\ufffd"
    assert texts([0xE4, 0x41, 0xC3, 0xA9]) == ["\ufffd", "A", "", "é"]


@given(st.lists(st.sampled_from([0x41, 0xEF, 0xBF, 0xBD, 0xC3, 0xA9, 0xF0, 0x9F, 0x99, 0x82]), max_size=12))
@settings(max_examples=200)
def test_the_texts_of_any_bytes_are_what_they_decode_to(ids: list[int]) -> None:
    assert "".join(texts_of(ids, TOKENIZER)) == TOKENIZER.decode(ids)


# --- hostile rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_of_a_row_is_an_element_or_an_attribute(tmp_path: Path, plain: Reader, text: str) -> None:
    rows = [talk(text, f"{text}{text}"), talk(text, text), talk(text, text), {"messages": text}, {text: 1}]
    seen = view(
        collected(tmp_path, rows, name=f"{text[:9].replace('/', '')}<b a=c>.jsonl".replace("\0", "")), **SEEN
    )
    html = page(seen)
    found = read(html)
    assert found.elements == plain.elements and found.attributes == plain.attributes
    assert "script" not in found.elements and "default-src 'none'" in html
    assert set(shown_texts(seen)) <= {text.replace("\n", "") for text in found.texts}
    printable = html.replace("\n", "")
    assert printable.isprintable(), sorted({c for c in printable if not c.isprintable()})
    assert seen.problems["bad"][0] == 2 and neutral(rows[4].popitem()[0])[:9] in found.other


@pytest.mark.parametrize("text", HOSTILE)
def test_a_terminal_is_sent_nothing_but_colours(tmp_path: Path, text: str) -> None:
    rows = [talk(text, text), {"messages": text}]
    seen = view(collected(tmp_path, rows, max_length=512), **SEEN)  # whole
    sent = as_text(seen, "256", 80) + as_text(seen, "256", 80, whole=True)
    assert "\x1b[" in sent
    rest = re.sub(r"\x1b\[[0-9;]*m", "", sent)
    assert rest.replace("\n", "").isprintable()
    for line in visible(text).split():
        assert line[:20] in rest.replace("\n", "")


@pytest.mark.parametrize("system", ["standard", "256"])
def test_shades_differ_by_training_and_between_neighbours(tmp_path: Path, system: Any) -> None:
    sent = as_text(view(collected(tmp_path, [talk("q", "abc")]), rows=1), system, 80)
    codes = {text: code for code, text in re.findall(r"\x1b\[([0-9;]*)m([abcq])\x1b", sent)}
    assert codes["a"] == codes["c"] and len({codes["a"], codes["b"], codes["q"]}) == 3


def test_errors_send_no_control_characters_to_a_terminal(preview: Preview) -> None:
    code, out, err = preview(
        rows=[talk("a", "b"), {"\x1b[2J\u202e": 1}, {"messages": [{"role": "\x9b" + "x" * 999}]}]
    )
    assert code == 65 and (out + err).replace("\n", "").isprintable() and len(err) < 900
    assert 'rows.jsonl:2: "messages" is missing; the row has "\\x1b[2J\\u202e"\n' in err


def test_the_page_is_written_whole(preview: Preview) -> None:
    code, out, _ = preview(
        "--html", "page.html", rows=[talk(text, text) for text in HOSTILE], data="max_length: 999"
    )
    assert (code, out) == (0, "wrote page.html\n")
    assert Path("page.html").read_text(encoding="utf-8").endswith("</body></html>\n")
    code, out, _ = preview("--html", "page.html", "--json")
    assert code == 0 and len(json.loads(out)["rows"]) == 3


def test_a_bad_row_is_named_on_the_page(preview: Preview) -> None:
    code, _, err = preview("--html", "page.html", rows=[talk("a", "b"), "<script>"])
    assert code == 65 and "rows.jsonl:2" in err
    assert "rows.jsonl:2" in Path("page.html").read_text(encoding="utf-8")


def test_the_page_has_each_ledger_once(tmp_path: Path) -> None:
    """The terminal shows a text table of a set's sources; the page has a table of HTML in its place, also of
    the rows that are held out."""
    for name in ("a", "b"):
        rows = "".join(json.dumps(talk(f"{name} {number}?", "Yes.")) + "\n" for number in range(8))
        (tmp_path / f"{name}.jsonl").write_text(rows)
    train = [{"path": str(tmp_path / f"{name}.jsonl")} for name in ("a", "b")]
    data = collected(tmp_path, [], "empty.jsonl", train=train, eval_count=2)
    text = page(view(data, **SEEN))
    assert len(data.loaded.tables) == 2 * 4 and data.loaded.tables <= set(data.messages)
    assert not any(neutral(line) in text for line in data.loaded.tables)
    for title in ("data.train", "held out"):
        assert f"<th>{title}</th><th>a</th><th>b</th>" in text
