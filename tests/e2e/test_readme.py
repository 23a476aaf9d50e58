"""What README and docs/ say is true: tables are those of the code, transcripts have its words, links lead somewhere."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from lastgasp import cli, exitcodes
from lastgasp.config import GaspConfig
from lastgasp.steps.settings import MarksConfig
from lastgasp.testing.jobs import run_job
from lastgasp_lightning import LastGasp
from support.pages import DOCS, README, ROOT, blocks, rows, shell_lines
from support.step_jobs import Shape, write

CONFIGURATION, FAULTS, COMMANDS, REPORT, START = (
    DOCS / f"{name}.md" for name in ("configuration", "faults", "command-line", "report", "getting-started")
)


def test_extras_are_those_of_the_package() -> None:
    declared = (ROOT / "pyproject.toml").read_text()
    extras = {cells[0] for cells in rows(START, "| extra | brings |")}
    for extra in {name.strip() for cell in extras for name in cell.split(",")} | {"cli", "lightning"}:
        assert re.search(rf"^{extra} = \[", declared, re.M), extra


def test_make_targets_exist() -> None:
    targets = {line.split()[1] for line in shell_lines() if line.startswith("make ")}
    for page in (README, *DOCS.rglob("*.md")):
        targets |= set(re.findall(r"`make ([a-z-]+)`", page.read_text()))
    found = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.M))
    assert targets <= found


def test_configuration_is_that_of_the_code() -> None:
    table = {cells[0]: cells for cells in rows(CONFIGURATION, "| argument | environment | default ")}
    parameters = inspect.signature(LastGasp.__init__).parameters.values()
    arguments = {one.name for one in parameters if one.kind is not one.VAR_KEYWORD} - {"self"}
    assert set(table) == arguments
    fields = {f.name: f.default for f in dataclasses.fields(GaspConfig) if f.name != "directory"}
    marks = {"marks": True, "profiling_dir": "none", "profiling_limit_mb": MarksConfig().limit_mb}
    assert MarksConfig() == MarksConfig.resolve(marks=True)
    fields |= marks | {"recovery": "auto, restart", "arena": "auto"}
    assert {"dir", *fields} == arguments
    for name, (_, variable, default, *_) in table.items():
        assert variable == f"LASTGASP_{name.upper()}"
        assert default == ("none" if name == "dir" else str(fields[name])), name


@pytest.mark.parametrize("name", ["keep", "resume", "hang_timeout", "save_timeout", "finish_timeout", "sha256"])
def test_each_variable_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"resume": "never", "sha256": "1"}.get(name, "7")
    monkeypatch.setenv(f"LASTGASP_{name.upper()}", value)
    assert str(getattr(GaspConfig.resolve("ckpts"), name)) in (value, f"{value}.0", "True")


def test_every_variable_of_the_code_is_explained() -> None:
    sources = [*ROOT.glob("core/**/*.py"), *ROOT.glob("plugins/**/*.py")]
    used = {name for path in sources for name in re.findall(r"""["'](LASTGASP_[A-Z_]*[A-Z])["']""", path.read_text())}
    internal = {"LASTGASP_CONTROLLER_PROCESS", "LASTGASP_JOB_MARK", "LASTGASP_LED", "LASTGASP_PARENT"}
    explained = set(re.findall(r"`(LASTGASP_[A-Z0-9_]+)`", CONFIGURATION.read_text()))
    assert used - internal <= explained
    names = {f"LASTGASP_{f.name.upper()}" for f in dataclasses.fields(GaspConfig)}
    names |= {"LASTGASP_MARKS", "LASTGASP_PROFILING_LIMIT_MB", "LASTGASP_REQUIRE_MANIFEST", "LASTGASP_ATTEMPTS"}
    names |= {"LASTGASP_RECOVERY", "LASTGASP_ARENA", "LASTGASP_BUDDY"}
    everything = used | names | {"LASTGASP_DIR"}
    assert explained <= everything


def test_exit_codes_are_those_of_the_code() -> None:
    found = {cells[1]: int(cells[0]) for cells in rows(FAULTS, "| code | name ")}
    assert found == {n: value for n, value in vars(exitcodes).items() if n.isupper() and not n.startswith("_")}
    meanings = re.findall(r'^"""(.*)"""$', (ROOT / "core/lastgasp/exitcodes.py").read_text(), re.M)
    for cells, meaning in zip(rows(FAULTS, "| code | name "), meanings[1:], strict=False):
        assert set(re.findall(r"\w+", meaning.lower())) & set(re.findall(r"\w+", cells[2].lower()))


def test_commands_are_those_of_the_program() -> None:
    assert {cells[0] for cells in rows(COMMANDS, "| command | what it does")} == {f"lastgasp {c}" for c in cli.COMMANDS}


def documents() -> Iterator[Path]:
    """Those of the repository; environments, of a hundred thousand files, are not searched."""
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "out"]
        yield from (Path(folder, name) for name in files if name.endswith(".md"))


@pytest.mark.parametrize("path", sorted(documents()), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target


@pytest.mark.parametrize("plugin", ["lightning", "megatron", "mindformers", "transformers"])
def test_a_plugin_s_readme_names_every_module(plugin: str) -> None:
    folder = ROOT / "plugins" / plugin
    table = [cells[0] for cells in rows(folder / "README.md", "| module | what it holds")]
    named = set(re.findall(r"\w+\.py", " ".join(table)))
    assert named == {path.name for path in (folder / f"lastgasp_{plugin}").glob("*.py")} - {"__init__.py"}


def test_the_transcript_is_that_of_a_demo_that_went_well() -> None:
    [text] = [text for text in blocks(START, "text") if "$ make demo" in text]
    story = (ROOT / "core/lastgasp/cli/_demo.py").read_text()
    checks = [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│")]
    assert len(checks) >= 8
    for check in checks:
        assert check.partition(": ")[2] in story if ": " in check else check in story, check
    assert "FAILED" not in text
    assert (ROOT / "assets/demo-timeline.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_s_transcript_is_in_the_report_s_words(tmp_path: Path) -> None:
    for task, communication in {"without": False, "with": True}.items():
        write(Shape(slow={2: {"data": 0.02}}, buffers=True, communication=communication), 1, tmp_path / task)
    done = [
        CliRunner(env={"COLUMNS": "100"}).invoke(cli.main, ["report", str(tmp_path / task)])
        for task in ("without", "with")
    ]
    assert [one.exit_code for one in done] == [0, 0]
    printed = "".join(one.output for one in done)
    [shown] = [text for text in blocks(REPORT, "text") if "$ lastgasp report" in text]

    def in_words(text: str) -> set[str]:
        text = text.replace(" host ", " ")  # where it is known
        return {re.sub(r"([\d.]|\s)+", " ", line).strip() for line in text.splitlines()}

    told = {line for line in in_words(shown) if line.startswith(("rank", "waits", "the others", "fwd", "Slow"))}
    assert len(told) >= 6
    assert told <= in_words(printed), printed


def test_the_transcripts_of_ps_and_switch_have_the_columns_of_the_program() -> None:
    [shown] = [text for text in blocks(REPORT, "text") if "$ lastgasp ps" in text]
    heads = [[cell.strip() for cell in line.strip("┃").split("┃")] for line in shown.splitlines() if "┃" in line]
    source = "".join((ROOT / f"core/lastgasp/cli/{name}.py").read_text() for name in ("ps", "switch", "_jobs"))
    assert [len(head) for head in heads] == [9, 4]
    assert not [name for head in heads for name in head if f'"{name}"' not in source]


def test_the_speed_tables_are_those_of_the_results() -> None:
    done = run_job([sys.executable, "-c", _COMPARE, str(ROOT)], Path(os.devnull), timeout=250, environ=os.environ)
    assert done.returncode == 0


def test_the_pictures_of_the_benchmarks_are_those_of_the_results_and_all_are_on_the_page(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _COMPARE_PICTURES, str(ROOT), str(tmp_path)]
    done = run_job(command, tmp_path / "log", timeout=250, environ=os.environ)
    assert done.returncode == 0, done.output


_COMPARE = """
import sys
sys.path.insert(0, sys.argv[1])
from benchmarks import publish
inside = {p: p.read_text().partition(publish.BEGIN)[2].partition(publish.END)[0].strip() for p in publish.tables()}
sys.exit(inside != publish.tables() or not all(inside.values()))
"""
_COMPARE_PICTURES = """
import sys
from collections.abc import Iterator
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from benchmarks import figures, publish
drawn = figures.pictures(publish.documents())
assert drawn
for one in drawn:
    assert figures.shown(publish.PICTURES / f"{one.name}.svg") == figures.numbers(one), one.name
    assert f"](../assets/{one.name}.svg)" in publish.ALL.read_text(), one.name
assert {p.stem for p in publish.PICTURES.glob("bench-*.svg")} == {one.name for one in drawn}
once, again = Path(sys.argv[2]) / "once", Path(sys.argv[2]) / "again"
for folder in (once, again):
    folder.mkdir()
    figures.write(publish.documents(), folder)
assert all(path.read_bytes() == (again / path.name).read_bytes() for path in once.iterdir())
"""
