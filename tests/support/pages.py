"""README and the pages of docs/, as tests read them: code, commands, tables."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
SHOWN = [README, *sorted(DOCS.rglob("*.md"))]
"""What users read about lastgasp; the examples' own pages are held by the examples' tests."""


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.M | re.S)


def shell_lines() -> dict[str, list[str]]:
    """Every command that is shown -> the pages that show it. Comments behind it are left out."""
    found: dict[str, list[str]] = {}
    for page in SHOWN:
        for line in (line for block in blocks(page, "sh") for line in block.splitlines() if line.strip()):
            found.setdefault(re.sub(r"\s+# .*", "", line), []).append(str(page.relative_to(ROOT)))
    return found


def rows(path: Path, header: str) -> list[list[str]]:
    """The cells of the table whose first line begins with `header`, without back quotes."""
    lines = path.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(header)) + 2
    found = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        found.append([cell.strip().replace("`", "") for cell in line.strip("|").split(" | ")])
    return found
