"""The ledger: what became of every row of a source, as counts, sentences, a table or JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True)
class Ledger:
    """What became of the rows of a source. Every row is counted in exactly one of the first group:

    rows = used + bad + empty + undesirable + held_out + dropped + without_target + identical

    used            rows that examples are made of
    bad             rows that cannot be read (data.on_bad_row: drop)
    empty           rows of at most one token
    undesirable     rows labeled as undesirable (KTO)
    held_out        rows held out for evaluation
    dropped         rows left out because they are longer than max_length
    without_target  rows left out because they have no target, or none after truncation
    identical       pairs left out because both answers are truncated to the same tokens

    truncated       rows longer than max_length of which a part is used
    split           rows that several examples have a part of
    duplicate       rows with the content of an earlier row, of this source or of one before it
    without_end     used rows whose targets stop before the end of the turn or text

    tokens          tokens of the rows that were read
    examples        number of examples; more than rows if rows were split
    example_tokens  tokens of the examples
    trained_tokens  targets of the examples
    dropped_tokens  tokens of the dropped rows
    truncated_tokens  tokens cut off, or in pieces without a target
    blank_lines     blank lines skipped in the files, which do not count as rows
    """

    rows: int = 0
    used: int = 0
    bad: int = 0
    empty: int = 0
    undesirable: int = 0
    held_out: int = 0
    dropped: int = 0
    without_target: int = 0
    identical: int = 0
    truncated: int = 0
    split: int = 0
    duplicate: int = 0
    without_end: int = 0
    tokens: int = 0
    examples: int = 0
    example_tokens: int = 0
    trained_tokens: int = 0
    dropped_tokens: int = 0
    truncated_tokens: int = 0
    blank_lines: int = 0

    @property
    def masked_tokens(self) -> int:
        """Number of tokens of the examples that are no targets."""
        return self.example_tokens - self.trained_tokens

    @property
    def lost_tokens(self) -> int:
        return self.dropped_tokens + self.truncated_tokens

    @property
    def left_out(self) -> int:
        """Number of rows lost unintentionally, which data.max_dropped_fraction limits."""
        return self.bad + self.empty + self.dropped + self.without_target + self.identical

    def figures(self) -> dict[str, int]:
        """Return all counts by name."""
        return asdict(self) | {"masked_tokens": self.masked_tokens, "lost_tokens": self.lost_tokens}

    def text(self, what: str = "row") -> str:
        """Return the ledger as one paragraph, without counts that are zero. what: "row" or "pair"."""
        rows, examples = _counted(self.rows, what), _counted(self.examples, "example")
        said = [f"{rows} gave {examples} of {self.example_tokens:,} tokens,"]
        said.append(f"{self.trained_tokens:,} of them trained on.")
        happened = (
            (self.held_out, "held out"),
            (self.bad, "bad and dropped"),
            (self.empty, "empty and left out"),
            (self.undesirable, "labeled undesirable and left out"),
            (self.dropped, "too long and dropped"),
            (self.truncated, "truncated"),
            (self.split, "split"),
            (self.without_target, "left out, without a target"),
            (self.identical, "left out, with both answers truncated to the same tokens"),
            (self.without_end, "without an end of turn"),
        )
        said += [f"{_were(count, what)} {became}." for count, became in happened if count]
        if self.duplicate:
            verb = "repeats" if self.duplicate == 1 else "repeat"
            said.append(f"{_counted(self.duplicate, what)} {verb} an earlier {what}.")
        if self.lost_tokens:
            said.append(f"{self.lost_tokens:,} tokens were cut off or dropped.")
        if self.blank_lines:
            lines = "line was" if self.blank_lines == 1 else "lines were"
            said.append(f"{self.blank_lines:,} blank {lines} skipped.")
        return " ".join(said)


def total(ledgers: Sequence[Ledger]) -> Ledger:
    return Ledger(*(sum(getattr(one, field.name) for one in ledgers) for field in fields(Ledger)))


def table(ledgers: Mapping[str, Ledger], what: str = "row") -> list[str]:
    """Return the lines of a table with a row per source and one for all; columns of zeros are left out. what:
    "row" or "pair"."""
    sums = total(list(ledgers.values()))
    rows = {**ledgers, "all": sums}
    shown = [(name, title) for name, title in _COLUMNS if name in _ALWAYS or getattr(sums, name)]
    cells = [["", *(f"{what}s" if name == "rows" else title for name, title in shown)]]
    cells += [[name, *(f"{getattr(one, key):,}" for key, _ in shown)] for name, one in rows.items()]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    laid = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in cells)
    return ["  ".join(line).rstrip() for line in laid]


_COLUMNS = (
    ("rows", "rows"),
    ("examples", "examples"),
    ("example_tokens", "tokens"),
    ("trained_tokens", "trained on"),
    ("held_out", "held out"),
    ("bad", "bad"),
    ("empty", "empty"),
    ("undesirable", "undesirable"),
    ("dropped", "dropped"),
    ("truncated", "truncated"),
    ("split", "split"),
    ("without_target", "no target"),
    ("identical", "same answers"),
    ("without_end", "no end of turn"),
    ("duplicate", "duplicate"),
    ("lost_tokens", "tokens lost"),
    ("blank_lines", "blank lines"),
)
_ALWAYS = ("rows", "examples", "example_tokens", "trained_tokens")


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _were(count: int, what: str) -> str:
    return f"{_counted(count, what)} {'was' if count == 1 else 'were'}"
