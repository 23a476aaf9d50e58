"""Tables of the documentation that are made from the code: `python tests/support/tables.py` writes them anew."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def acjob_rules() -> str:
    """The rules of `lastgasp job check`."""
    from lastgasp.jobs.acjob.check import FAMILIES
    from lastgasp.jobs.acjob.rules import RULES

    assert FAMILIES
    rows = [(f"`{one.id}`", one.severity, one.title, _fact(one.source, "job_yaml")) for one in _sorted(RULES)]
    return _table(("rule", "weight", "what is found", "facts"), rows)


def acjob_patches() -> str:
    """What `lastgasp job patch` adds for each goal, taken from patches of a bare job."""
    from lastgasp.jobs.acjob.check import source_of
    from lastgasp.jobs.acjob.patch import GOALS, goals_of, patch
    from support.acjob import NAME, bare

    rows = []
    for goal in GOALS:
        patched = patch(source_of(NAME, bare().encode()), goals_of(goal))
        added = [line[1:] for line in patched.diff("x").splitlines()[2:] if line.startswith("+")]
        job = [_cell(line.strip()) for line in added if re.match(r" {4}[a-zA-Z]", line)]
        names = dict.fromkeys(found[1] for line in added if (found := re.search(r"name: ([-A-Z_a-z]+)$", line)))
        rows.append((f"`{goal}`", "<br>".join(job), ", ".join(f"`{name}`" for name in names)))
    return _table(("strategy", "labels and annotations", "variables, ports and mounts of every replica type"), rows)


def doctor_checks() -> str:
    """The traps of `lastgasp doctor`."""
    from lastgasp.doctor.checks import every_check

    rows = [(f"`{one.id}`", one.severity, one.title, _fact(one.source)) for one in _sorted(every_check())]
    return _table(("check", "weight", "what is found", "facts"), rows)


def command_help() -> str:
    """What each command prints for `--help`, a section for each."""
    import click

    from lastgasp.cli import COMMANDS, main

    top = click.Context(main, info_name="lastgasp", terminal_width=100, **main.context_settings)
    todo, found = [(name, command, top) for name in COMMANDS if (command := main.get_command(top, name))], []
    while todo:
        name, command, above = todo.pop(0)
        context = click.Context(command, parent=above, info_name=name, **command.context_settings)
        found.append(f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n")
        if isinstance(command, click.Group):
            todo = [(one, command.commands[one], context) for one in sorted(command.commands)] + todo
    return "\n".join(["", *found])


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "help": ("command-line.md", command_help),
    "rules": ("ascend-job-yaml.md", acjob_rules),
    "patches": ("ascend-job-yaml.md", acjob_patches),
    "checks": ("doctor.md", doctor_checks),
}
"""Name of the marker -> page, and what makes the table."""


def in_page(name: str) -> str:
    """The table as the page has it."""
    page, _ = TABLES[name]
    found = _between(name).search((DOCS / page).read_text())
    return found[1] if found else ""


def write() -> None:
    """Put every table into its page."""
    for name, (page, make) in TABLES.items():
        text = (DOCS / page).read_text()
        new = f"<!-- begin {name} -->\n{make()}<!-- end {name} -->"
        (DOCS / page).write_text(_between(name).sub(lambda _, new=new: new, text))  # type: ignore[misc]


def _between(name: str) -> re.Pattern[str]:
    return re.compile(rf"<!-- begin {name} -->\n(.*?)<!-- end {name} -->", re.S)


def _fact(source: str, page: str = "") -> str:
    """Where the fact is, as links: `taskd.md §2, §5`, or `§3` of `page`; other words stay as they are."""
    parts = []
    for part in source.split(", "):
        named = re.match(r"(?:([\w-]+)(?:\.md)? )?§", part)
        target = named[1] or page if named else part.removesuffix(".md") if part.endswith(".md") else ""
        page = target or page
        folder = "" if target == "how-it-works" else "facts/"
        parts.append(f"[{part}]({folder}{target}.md)" if target else part)
    return ", ".join(parts)


def _sorted(table: Mapping[str, Any]) -> list[Any]:
    """Errors first, then by name: the tables' own order is that of imports."""
    return sorted(table.values(), key=lambda one: (one.severity, one.id))


def _cell(text: str) -> str:
    return f"`{text}`"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n" for row in lines)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "core")]
    write()
