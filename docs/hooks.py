"""mkdocs: pages outside of docs/ become pages of the site, and links to and from them keep leading somewhere.

On GitHub the same links lead to the files themselves. A link to a file that is not a page (a script) becomes its name.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")

_CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
_PATH = re.compile(r"<code>([^<]*/[^<]*)</code>")


def outside() -> dict[Path, str]:
    """File outside of docs/ -> where the site has it."""
    pages = {path: f"examples/{path.parent.name}.md" for path in ROOT.glob("examples/*/README.md")}
    pages |= {ROOT / name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md")}
    pictures = {path: f"assets/{path.name}" for path in (ROOT / "assets").iterdir()}
    return pages | pictures


def on_files(files: Any, config: Any) -> Any:
    """Add them to the site."""
    for path, uri in outside().items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links that leave docs/ into links of the site."""
    source = Path(page.file.abs_src_path)
    here = Path(page.file.src_uri).parent
    return _LINK.sub(lambda found: _rewritten(found, source, here), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Let paths in the cells of tables break where their parts end."""
    return _CELL.sub(lambda cell: _PATH.sub(_breakable, cell[0]), html)


def _breakable(code: re.Match[str]) -> str:
    return "<code>" + re.sub(r"(?<=\w)([/_])(?=\w)", r"\1<wbr>", code[1]) + "</code>"


def _rewritten(found: re.Match[str], source: Path, here: Path) -> str:
    picture, text, target, anchor = found[1], found[2], found[3], found[4] or ""
    if ":" in target:
        return found[0]
    path = Path(os.path.normpath(source.parent / target))
    uri = outside().get(path) or outside().get(path / "README.md")
    if uri is None and path.is_relative_to(ROOT / "docs"):
        uri = str(path.relative_to(ROOT / "docs"))
    if uri is not None:
        return f"{picture}[{text}]({os.path.relpath(uri, here)}{anchor})"
    return text if path.exists() and not picture else found[0]  # what leads nowhere is left for --strict to find
