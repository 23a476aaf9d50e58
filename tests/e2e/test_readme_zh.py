"""README.zh-CN.md says what README.md says: the same sections, commands, names and links."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGLISH, CHINESE = (ROOT / name for name in ("README.md", "README.zh-CN.md"))
SPEED = "<!-- speed: written by"
"""What the benchmarks write stands in the English one only; the Chinese one links to it."""
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def prose(path: Path) -> str:
    """The text without its blocks, and without what the benchmarks have written."""
    text = path.read_text().partition(SPEED)[0] + path.read_text().partition("<!-- /speed -->")[2]
    return _BLOCK.sub("", text)


def headings(path: Path) -> list[int]:
    """The level of each, in order."""
    return [len(marks) for marks in re.findall(r"^(#+) ", _BLOCK.sub("", path.read_text()), re.M)]


def test_each_names_the_other() -> None:
    assert "(README.zh-CN.md)" in ENGLISH.read_text()
    assert "(README.md)" in CHINESE.read_text()


def test_the_same_sections() -> None:
    assert headings(CHINESE) == headings(ENGLISH)


def test_the_same_commands_and_code() -> None:
    assert _BLOCK.findall(CHINESE.read_text()) == _BLOCK.findall(ENGLISH.read_text())


def test_the_same_names() -> None:
    """Commands, options, variables, files: all that stands in back quotes."""
    ours, theirs = (set(re.findall(r"`([^`\n]+)`", prose(path))) for path in (CHINESE, ENGLISH))
    assert (theirs - ours, ours - theirs) == (set(), set())


def test_the_same_tables() -> None:
    """As many rows each, in the same order."""
    tables = (re.findall(r"(?:^\|.*\n)+", prose(page), re.M) for page in (CHINESE, ENGLISH))
    counts = [[len(table.splitlines()) for table in found] for found in tables]
    assert counts[0] == counts[1]


def test_the_same_links() -> None:
    ours, theirs = (Counter(re.findall(r"\]\(([^)#]+)\)", prose(path))) for path in (CHINESE, ENGLISH))
    own = {"README.md", "README.zh-CN.md"}
    assert {name for name in theirs if name not in own} == {name for name in ours if name not in own}


def test_both_are_short() -> None:
    assert [page.name for page in (ENGLISH, CHINESE) if len(page.read_text().splitlines()) > 150] == []


def test_it_is_chinese() -> None:
    text = prose(CHINESE)
    assert len(re.findall(r"[\u4e00-\u9fff]", text)) > 900
