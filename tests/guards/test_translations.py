"""The Chinese pages follow the English ones: README.zh.md follows README.md, docs/zh/X follows docs/X. The
two pages of a pair have the same blocks (except for comments), headings, tables, lists and links, and the
translation has all names in backticks. A heading of a translation ends with the anchor of the English one,
such as `<a id="start"></a>`."""

import os
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
PAIRS = {ROOT / "README.md": ROOT / "README.zh.md"} | {
    DOCS / page.relative_to(DOCS / "zh"): page for page in sorted((DOCS / "zh").rglob("*.md"))
}
ENGLISH = {translation: page for page, translation in PAIRS.items()}


def anchor(heading: str) -> str:
    """Return the id that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def link_target(page: Path, link: str) -> str:
    """Return where a link of a page leads, from the project's folder; a translation counts as its page."""
    path, _, fragment = link.partition("#")
    if ":" in path:
        return link
    target = Path(os.path.normpath(page.parent / path)) if path else page
    target = ENGLISH.get(target, target)
    return f"{target.relative_to(ROOT)}#{fragment}"


def parts(page: Path) -> dict[str, list[str]]:
    """Return what a page and its translation have in common, by kind."""
    text = page.read_text(encoding="utf-8")
    fenced = re.compile(r"^```.*?^```$", re.M | re.S)
    blocks = [re.sub(r"[ \t]*(?<!\S)#[^\n]*", "", block) for block in fenced.findall(text)]
    prose = fenced.sub("", text)
    headings = re.findall(r"^(##+) (.+)$", prose, re.M)
    ids = [re.search(r'<a id="([^"]+)"></a>$', words) for _, words in headings]
    is_translation = page in ENGLISH
    return {
        "blocks": blocks,
        "headings": [
            f"{level} {(found[1] if found else 'no anchor') if is_translation else anchor(words)}"
            for (level, words), found in zip(headings, ids, strict=True)
        ],
        "cells of tables": [str(line.count("|")) for line in prose.splitlines() if line.startswith("|")],
        "items of lists": [found[0] for found in re.finditer(r"^ *(-|\*|\d+\.) ", prose, re.M)],
        "links": sorted(link_target(page, link) for link in re.findall(r"\]\(([^)\s]+)\)", prose)),
        "names": [" ".join(name.split()) for name in re.findall(r"`([^`]+)`", prose)],
    }


def differences(page: Path, translation: Path) -> dict[str, tuple[list[str], list[str]]]:
    """Return what the two pages do not have in common: only in the page, only in the translation;
    both are empty if the order differs."""
    ours, theirs = parts(page), parts(translation)
    theirs["names"] = [name for name in theirs["names"] if name in ours["names"]]  # it may repeat and explain
    ours["names"], theirs["names"] = sorted(set(ours["names"])), sorted(set(theirs["names"]))
    return {
        kind: (
            list((Counter(found) - Counter(theirs[kind])).elements()),
            list((Counter(theirs[kind]) - Counter(found)).elements()),
        )
        for kind, found in ours.items()
        if found != theirs[kind]
    }


def test_required_pages_are_translated() -> None:
    wanted = {
        ROOT / "README.md", DOCS / "README.md", DOCS / "exit-codes.md", *(DOCS / "tutorials").glob("*.md"),
    }  # fmt: skip
    assert len(wanted) > 7 and wanted - set(PAIRS) == set()


@pytest.mark.parametrize("page", PAIRS, ids=lambda page: str(page.relative_to(ROOT)))
def test_translations_match_their_pages(page: Path) -> None:
    assert page.is_file(), f"{PAIRS[page]} translates a page that does not exist"
    assert differences(page, PAIRS[page]) == {}, "only in English, only in Chinese"


def test_untranslated_change_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, translation = tmp_path / "page.md", tmp_path / "zh.md"
    monkeypatch.setitem(ENGLISH, translation, page)
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    text = (
        "# Title\n\n[x](zh.md)\n\n## Now train\n\n```\na --b  # why\n```\n\n| a | b |\n\n- `key` [y](y.md#z)"
    )
    translated = text.replace("Title", "题").replace("zh.md", "page.md").replace("# why", "# 为什么")
    translated = translated.replace("Now train", '训练 <a id="now-train"></a>')
    translation.write_text(translated, encoding="utf-8")
    page.write_text(text, encoding="utf-8")
    assert parts(page)["headings"] == ["## now-train"] and differences(page, translation) == {}
    for kind, before, after in [
        ("headings", "Now train", "Train now"),
        ("headings", "## Now", "### Now"),
        ("blocks", "a --b", "a --c"),
        ("cells of tables", "| a | b |", "| a | b | c |"),
        ("items of lists", "- `key`", "`key`"),
        ("links", "y.md#z", "y.md#zz"),
        ("names", "`key`", "`keys`"),
    ]:
        page.write_text(text.replace(before, after), encoding="utf-8")
        assert list(differences(page, translation)) == [kind]
