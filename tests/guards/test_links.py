"""Every link between pages leads to a file, and to a heading of it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])


def anchors(page: Path) -> set[str]:
    """Return the ids of a page's headings, as GitHub makes them, and those that are written."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", prose, re.M)
    written = re.findall(r'<a id="([^"]+)"></a>', prose)
    return {re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-") for words in headings} | set(written)


def broken(page: Path) -> list[str]:
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        path, _, fragment = link.partition("#")
        target = page.parent / path if path else page
        if ":" not in path and (
            not target.exists() or (fragment and target.suffix == ".md" and fragment not in anchors(target))
        ):
            found.append(f"{page.relative_to(ROOT)}: {link}")
    return found


def test_links_lead_somewhere() -> None:
    assert len(PAGES) > 40
    assert [link for page in PAGES for link in broken(page)] == []


def test_named_tests_exist() -> None:
    named = re.findall(r"`(tests/\S+\.py)::(test_\w+)`", "".join(page.read_text("utf-8") for page in PAGES))
    assert len(named) >= 25
    missing = [
        f"{path}::{name}" for path, name in named if f"def {name}(" not in (ROOT / path).read_text("utf-8")
    ]
    assert missing == []


def test_each_fault_of_other_tools_names_its_test() -> None:
    page = (ROOT / "docs" / "faults.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+)\. .*\| `tests/\S+\.py::test_\w+` \|$", page, re.M)
    assert rows == [str(number) for number in range(1, 26)]
