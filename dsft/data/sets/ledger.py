"""The ledger: what became of every row of a source, as counts, sentences, a table or JSON."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
    prompt_cut      used rows whose prompt lost its beginning

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
    prompt_cut: int = 0
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

    def text(self, unit: str = "row", refused: Collection[str] = ()) -> str:
        """Return the ledger as one paragraph, without counts that are zero. unit: "row" or "pair"; refused:
        the counts of rows for which a run stops, of "bad" and "dropped"."""
        rows, examples = _counted(self.rows, unit), _counted(self.examples, "example")
        sentences = [f"{rows} gave {examples} of {self.example_tokens:,} tokens,"]
        sentences.append(f"{self.trained_tokens:,} of them trained on.")
        sentences += self.outcomes(unit, refused)
        if self.duplicate:
            verb = "repeats" if self.duplicate == 1 else "repeat"
            sentences.append(f"{_counted(self.duplicate, unit)} {verb} an earlier {unit}.")
        lost = self.truncated_tokens if "dropped" in refused else self.lost_tokens
        if lost:
            sentences.append(f"{lost:,} tokens were cut off or dropped.")
        if self.blank_lines:
            sentences.append(f"{_were(self.blank_lines, 'blank line')} skipped.")
        return " ".join(sentences)

    def outcomes(self, unit: str, refused: Collection[str] = ()) -> list[str]:
        """Return a sentence for each thing that happened to rows."""
        found = []
        for name, (_, outcome) in COLUMNS.items():
            if outcome and getattr(self, name):
                ends = " and dropped" if name not in refused else ", so a run stops"
                outcome += ends * (name in ("bad", "dropped"))
                found.append(f"{_were(getattr(self, name), unit)} {outcome}.")
        if self.prompt_cut:
            found.append(f"The prompts of {self.prompt_cut:,} of {self.used:,} {unit}s lost their beginning.")
        return found


COLUMNS: Mapping[str, tuple[str, str]] = {
    "rows": ("", ""),  # it and the next three are always shown
    "examples": ("examples", ""),
    "example_tokens": ("tokens", ""),
    "trained_tokens": ("trained on", ""),
    "held_out": ("held out", "held out"),
    "bad": ("bad", "bad"),
    "empty": ("empty", "empty and left out"),
    "undesirable": ("undesirable", "labeled undesirable and left out"),
    "dropped": ("too long", "longer than data.max_length"),
    "truncated": ("truncated", "truncated"),
    "split": ("split", "split"),
    "without_target": ("no target", "left out, without a target"),
    "identical": ("same answers", "left out, with both answers truncated to the same tokens"),
    "without_end": ("no end of turn", "without an end of turn"),
    "prompt_cut": ("prompt cut", ""),
    "duplicate": ("duplicate", ""),
    "lost_tokens": ("tokens lost", ""),
    "blank_lines": ("blank lines", ""),
}
"""Counts in the order in which they are shown -> the title of their column in a table, and what happened to
these rows in a sentence; "": there is none."""


def total(ledgers: Sequence[Ledger]) -> Ledger:
    return Ledger(*(sum(getattr(one, field.name) for one in ledgers) for field in fields(Ledger)))


def table(ledgers: Mapping[str, Ledger], unit: str = "row") -> list[str]:
    """Return the lines of a table with a row per source and one for all; columns of zeros are left out. unit:
    "row" or "pair"."""
    sums = total(list(ledgers.values()))
    names = [name for number, name in enumerate(COLUMNS) if number < 4 or getattr(sums, name)]
    cells = [["", *(COLUMNS[name][0] or f"{unit}s" for name in names)]]
    for source, ledger in {**ledgers, "all": sums}.items():
        cells.append([source, *(f"{getattr(ledger, name):,}" for name in names)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rows = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in cells)
    return ["  ".join(row).rstrip() for row in rows]


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _were(count: int, what: str) -> str:
    return f"{_counted(count, what)} {'was' if count == 1 else 'were'}"
