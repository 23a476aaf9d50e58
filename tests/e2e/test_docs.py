"""What README, docs/, plugins and examples show: commands that exist, with options that they take."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from lastgasp.cli import main

ROOT = Path(__file__).parents[2]
_FOLDERS = ("README*.md", "docs/**/*.md", "plugins/*/README.md", "examples/*/README.md")
PAGES = sorted(page for pattern in _FOLDERS for page in ROOT.glob(pattern))
_BLOCK = re.compile(r"^```(?:sh|text|bash)\n(.*?)^```", re.M | re.S)
_INLINE = re.compile(r"`(lastgasp [a-z][^`\n]*)`")
_PLACEHOLDER = re.compile(r"\.\.\.|…|\\\|.*|\|.*|>.*|<[^>]*>")


def ids(path: Path) -> str:
    """For pytest."""
    return str(path.relative_to(ROOT))


def commands(page: Path) -> list[str]:
    """Every `lastgasp ...` of the page."""
    text = page.read_text()
    shown = [line.removeprefix("$ ") for block in _BLOCK.findall(text) for line in block.splitlines()]
    return [line for line in shown if re.match(r"lastgasp [a-z]", line)] + _INLINE.findall(text)


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_exist(page: Path) -> None:
    wrong = {}
    for shown in commands(page):
        words = shlex.split(_PLACEHOLDER.sub("", shown).replace("\\", ""), comments=True)[1:]
        if problem := misused(main, words):
            wrong[shown] = problem
    assert wrong == {}


def misused(group: click.Group, words: list[str]) -> str:
    """What is wrong about the command line; empty where nothing is."""
    context = click.Context(group)
    while words:
        command = group.get_command(context, words[0])
        if command is None:
            return f"no command {words[0]!r}"
        words = words[1:]
        if not isinstance(command, click.Group):
            known = {option for parameter in command.params for option in parameter.opts}
            given = [word.split("=")[0] for word in words if word.startswith("--")]
            if command.context_settings.get("ignore_unknown_options"):
                return ""
            return f"no option {next(o for o in given if o not in known)}" if set(given) - known - {"--help"} else ""
        group, context = command, click.Context(command, parent=context)
    return ""


_CITED = re.compile(r"\b(?:docs/)?(?:facts/)?([a-z_]+|how-it-works|command-line)\.md(?:`?,? §([\d., §]*\d))?")
_CODE = [path for folder in ("core", "plugins", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]


def sections(page: Path) -> set[str]:
    """The numbers of its headings, and of the items of numbered lists below them: 2, 2.1, 16.4."""
    found, above = set(), ""
    for line in page.read_text().splitlines():
        if heading := re.match(r"#+ (\d+(?:\.\d+)?) ", line):
            above = heading[1]
            found.add(above)
        elif item := re.match(r"(\d+)\. ", line):
            found.add(f"{above}.{item[1]}")
    return found


def test_the_sections_that_the_code_cites_exist() -> None:
    pages = {path.stem: path for path in [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/facts/*.md")]}
    pages |= {path.stem: path for path in ROOT.glob("docs/facts/*.md")}
    known = {name: sections(path) for name, path in pages.items()}
    cited = [(path, found) for path in _CODE for found in _CITED.finditer(path.read_text()) if found[2]]
    wrong = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path, found in cited
        if found[1] not in known or not set(re.split(r"[^\d.]+", found[2])) <= known[found[1]]
    ]
    assert wrong == []
    assert len(cited) > 100


def test_every_page_that_the_code_names_exists() -> None:
    named = {(path, name) for path in _CODE for name in re.findall(r"docs/[\w./-]+\.md", path.read_text())}
    assert [f"{path.relative_to(ROOT)}: {name}" for path, name in named if not (ROOT / name).exists()] == []


def test_a_wrong_command_would_be_seen() -> None:
    assert misused(main, ["vanish"]) == "no command 'vanish'"
    assert misused(main, ["job", "patch", "--nothing"]) == "no option --nothing"
    assert not misused(main, ["job", "patch", "job.yaml", "--strategy", "dump", "--write"])
    assert not misused(main, ["run", "--nproc-per-node", "2", "train.py"])
    assert len([page for page in PAGES if commands(page)]) > 8
