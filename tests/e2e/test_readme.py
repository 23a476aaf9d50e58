"""What the README shows is true: its code runs, its commands exist, its tables are those of the code."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import sys
from pathlib import Path

import pytest

from lastgasp import cli, exitcodes
from lastgasp.config import GaspConfig
from lastgasp.steps.settings import MarksConfig
from lastgasp.testing.jobs import Finished, run_job
from lastgasp_lightning import LastGasp
from support.step_jobs import Shape, write

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PLUGIN = ROOT / "plugins" / "lightning" / "README.md"
LIMIT = 240.0
PRELUDE = """\
import warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
from lightning.pytorch.demos.boring_classes import BoringModel
model = BoringModel()
"""
"""The user's model, with its data."""
ELSEWHERE = {
    'LASTGASP_FAULT="kind=sigkill,rank=1,step=33,phase=forward" examples/megatron_gpt/run.sh': "test_megatron_example",
    "pip install -e '.[lightning,cli]'": "needs the package registry; the extras are compared with pyproject.toml",
}
"""Shell lines that no test runs, and why. Those that begin with make are compared with the Makefile."""


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.M | re.S)


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


def shell_lines() -> list[str]:
    """Every command of the README."""
    return [line for block in blocks(README, "sh") for line in block.splitlines() if line.strip()]


def run_shell(line: str, folder: Path) -> Finished:
    """Run one of them as a user would, in `folder`, with this environment's programs."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    return run_job(["bash", "-c", f"cd {folder} && {line}"], folder / "log", timeout=LIMIT, environ=environ)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(blocks(README, "python"))))
@pytest.mark.timeout(300)
def test_each_piece_of_code_runs(number: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PRELUDE + blocks(README, "python")[number])
    done = run_shell("python train.py", tmp_path)
    assert done.ok, done.output[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_code_of_the_plugin_s_readme_runs(tmp_path: Path) -> None:
    [block] = blocks(PLUGIN, "python")
    (tmp_path / "train.py").write_text(PRELUDE + block)
    done = run_shell("python train.py", tmp_path)
    assert done.ok, done.output[-4000:]


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.timeout(900)
def test_the_commands_work_in_the_order_of_the_readme(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PRELUDE + blocks(README, "python")[0])
    ran = [line for line in shell_lines() if line not in ELSEWHERE and not line.startswith("make ")]
    assert len(ran) > 8
    for line in ran:
        done = run_shell(line, tmp_path)
        assert done.ok, f"{line}\n{done.output[-4000:]}"
    [record] = (tmp_path / "ckpts" / "incidents").glob("*.json")
    incident = json.loads(record.read_text())
    assert (incident["ending"], incident["step_saved"], incident["steps_lost"]) == ("saved", 20, 0)


def test_lines_that_are_not_run_still_stand_there() -> None:
    assert set(ELSEWHERE) <= set(shell_lines())
    declared = (ROOT / "pyproject.toml").read_text()
    for extra in ("lightning", "cli", "demo", "dev"):
        assert f"`{extra}`" in README.read_text()
        assert re.search(rf"^{extra} = \[", declared, re.M)


def test_make_targets_exist() -> None:
    targets = {line.split()[1] for line in shell_lines() if line.startswith("make ")}
    targets |= set(re.findall(r"`make ([a-z-]+)`", README.read_text()))
    found = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.M))
    assert targets <= found


def test_configuration_is_that_of_the_code() -> None:
    table = {cells[0]: cells for cells in rows(README, "| argument | environment | default ")}
    parameters = inspect.signature(LastGasp.__init__).parameters.values()
    arguments = {one.name for one in parameters if one.kind is not one.VAR_KEYWORD} - {"self"}
    assert set(table) == arguments
    fields = {f.name: f.default for f in dataclasses.fields(GaspConfig) if f.name != "directory"}
    marks = {"marks": True, "profiling_dir": "none", "profiling_limit_mb": MarksConfig().limit_mb}
    assert MarksConfig() == MarksConfig.resolve(marks=True)
    fields |= marks
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
    internal = {"LASTGASP_CONTROLLER_PROCESS", "LASTGASP_JOB_MARK", "LASTGASP_ROUND"}
    explained = set(re.findall(r"`(LASTGASP_[A-Z0-9_]+)`", README.read_text()))
    assert used - internal <= explained
    names = {f"LASTGASP_{f.name.upper()}" for f in dataclasses.fields(GaspConfig)}
    names |= {"LASTGASP_MARKS", "LASTGASP_PROFILING_LIMIT_MB", "LASTGASP_REQUIRE_MANIFEST", "LASTGASP_ATTEMPTS"}
    everything = used | names | {"LASTGASP_DIR"}
    assert explained <= everything


def test_exit_codes_are_those_of_the_code() -> None:
    found = {cells[1]: int(cells[0]) for cells in rows(README, "| code | name ")}
    assert found == {n: value for n, value in vars(exitcodes).items() if n.isupper() and not n.startswith("_")}
    meanings = re.findall(r'^"""(.*)"""$', (ROOT / "core/lastgasp/exitcodes.py").read_text(), re.M)
    for cells, meaning in zip(rows(README, "| code | name "), meanings[1:], strict=False):
        assert set(re.findall(r"\w+", meaning.lower())) & set(re.findall(r"\w+", cells[2].lower()))


def test_commands_are_those_of_the_program() -> None:
    assert {cells[0] for cells in rows(README, "| command | what it does")} == {f"lastgasp {c}" for c in cli.COMMANDS}


DOCUMENTS = [
    path for path in ROOT.rglob("*.md") if not any(part.startswith(".") or part == "out" for part in path.parts)
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target


@pytest.mark.parametrize("plugin", ["lightning", "megatron", "mindformers"])
def test_a_plugin_s_readme_names_every_module(plugin: str) -> None:
    folder = ROOT / "plugins" / plugin
    table = [cells[0] for cells in rows(folder / "README.md", "| module | what it holds")]
    named = set(re.findall(r"\w+\.py", " ".join(table)))
    assert named == {path.name for path in (folder / f"lastgasp_{plugin}").glob("*.py")} - {"__init__.py"}


def test_the_transcript_is_that_of_a_demo_that_went_well() -> None:
    [text] = [text for text in blocks(README, "text") if "$ make demo" in text]
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
    done = run_shell("export COLUMNS=100; lastgasp report without && lastgasp report with", tmp_path)
    assert done.ok, done.output
    [shown] = [text for text in blocks(README, "text") if "$ lastgasp report" in text]

    def in_words(text: str) -> set[str]:
        text = text.replace(" host ", " ")  # where it is known
        return {re.sub(r"([\d.]|\s)+", " ", line).strip() for line in text.splitlines()}

    told = {line for line in in_words(shown) if line.startswith(("rank", "waits", "the others", "fwd", "Slow"))}
    assert len(told) >= 6
    assert told <= in_words(done.output), done.output


def test_the_transcripts_of_ps_and_switch_have_the_columns_of_the_program() -> None:
    [shown] = [text for text in blocks(README, "text") if "$ lastgasp ps" in text]
    heads = [[cell.strip() for cell in line.strip("┃").split("┃")] for line in shown.splitlines() if "┃" in line]
    source = "".join((ROOT / f"core/lastgasp/cli/{name}.py").read_text() for name in ("ps", "switch", "_jobs"))
    assert [len(head) for head in heads] == [9, 4]
    assert not [name for head in heads for name in head if f'"{name}"' not in source]


def test_the_speed_tables_are_those_of_the_results() -> None:
    done = run_job([sys.executable, "-c", _COMPARE, str(ROOT)], Path(os.devnull), timeout=60, environ=os.environ)
    assert done.returncode == 0


_COMPARE = """
import sys
sys.path.insert(0, sys.argv[1])
from benchmarks import publish
inside = {p: p.read_text().partition(publish.BEGIN)[2].partition(publish.END)[0].strip() for p in publish.tables()}
sys.exit(inside != publish.tables() or not all(inside.values()))
"""
