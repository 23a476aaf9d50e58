"""The warm process without torch: what is forked from it is as a fresh interpreter, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lastgasp.errors import ConfigError
from lastgasp.gasp.imported import changed, libraries
from lastgasp.launch import warm, warm_process
from lastgasp.launch.forked import ForkedProcess
from lastgasp.launch.warm import Ranks, Start, Warm
from lastgasp.launch.warm_process import NoFork, WarmProcess, order_for

SCRIPT = Path(__file__).parents[1] / "support" / "interpreter.py"
COMMAND = [sys.executable, "-u", str(SCRIPT)]
ALIKE = ("pid", "parent", "draws", "environment")
"""Facts that are each process's own, or compared apart."""
PATIENCE = 60.0


@contextmanager
def process(folder: Path, *modules: str, **plan: Any) -> Iterator[WarmProcess]:
    """A warm process that finds its modules also in `folder`, where that is a library."""
    environment = os.environ | {"PYTHONPATH": f"{folder}:{SCRIPT.parents[1]}", "LASTGASP_ROUND": "0" * 16}
    whole = {"modules": modules, "environment": {}, "own": ["RANK"]} | plan
    found = WarmProcess(COMMAND, environment, whole)
    try:
        yield found
    finally:
        found.close()


def ready(found: WarmProcess) -> int:
    """Its memory, once it is ready."""
    deadline = time.monotonic() + PATIENCE
    while (memory := found.look()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return memory


def forked(found: WarmProcess, folder: Path, *command: str, **more: str) -> tuple[ForkedProcess, Path, Path]:
    """One rank, and the files of what it writes."""
    out, err = folder / "out", folder / "err"
    environment = os.environ | {"PYTHONPATH": f"{folder}:{SCRIPT.parents[1]}", "LASTGASP_ROUND": "1" * 16} | more
    with open(os.devnull) as null, out.open("w") as stdout, err.open("w") as stderr:
        order = order_for([*COMMAND[:2], *command], environment)
        return found.fork(order, [null.fileno(), stdout.fileno(), stderr.fileno()]), out, err


def fresh(folder: Path, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    """The same in an interpreter of its own."""
    environment = os.environ | {"PYTHONPATH": f"{folder}:{SCRIPT.parents[1]}", "LASTGASP_ROUND": "1" * 16} | more
    return subprocess.run([*COMMAND[:2], *command], env=environment, stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, start_new_session=True)  # fmt: skip


PROGRAMS = {"file": (str(SCRIPT), "a", "--b=c"), "module": ("-m", "support.interpreter", "d")}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_forked_rank_is_as_a_fresh_interpreter(program: tuple[str, ...], tmp_path: Path) -> None:
    with process(tmp_path, "json", "random", "multiprocessing") as found:
        ready(found)
        rank, out, err = forked(found, tmp_path, *program, RANK="1", ODD=os.fsdecode(b"\xff"))
        assert rank.wait(PATIENCE) == 0, err.read_text()
    expected = fresh(tmp_path, *program, RANK="1", ODD=os.fsdecode(b"\xff"))
    (line, end), (line_of_fresh, end_of_fresh) = out.read_text().splitlines(), expected.stdout.splitlines()
    mine, theirs = json.loads(line), json.loads(line_of_fresh)
    assert end == end_of_fresh == "atexit"
    assert {k: v for k, v in mine.items() if k not in ALIKE} == {k: v for k, v in theirs.items() if k not in ALIKE}
    assert mine["environment"] == theirs["environment"]
    assert (mine["pid"], mine["parent"]) == (rank.pid, os.getpid())
    assert not set(mine["draws"]) & set(theirs["draws"])
    assert err.read_text() == expected.stderr == ""


def test_two_ranks_draw_other_random_numbers(tmp_path: Path) -> None:
    with process(tmp_path, "random", "multiprocessing") as found:
        ready(found)
        draws = []
        for _ in range(2):
            rank, out, _ = forked(found, tmp_path, str(SCRIPT))
            assert rank.wait(PATIENCE) == 0
            draws += json.loads(out.read_text().splitlines()[0])["draws"]
    assert len(set(draws)) == 4


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts what runs in the background with SIGINT ignored, and so would be all that is started here."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("exit 3", 3),
        ("die 5", 5),
        ("raise x", 1),
        (f"signal {int(signal.SIGKILL)}", -9),
        ("signal 15", -15),
        ("interrupt", -2),
    ],
)
def test_it_ends_as_a_fresh_interpreter_does(what: str, code: int, tmp_path: Path, interruptible: None) -> None:
    with process(tmp_path) as found:
        ready(found)
        rank, out, err = forked(found, tmp_path, str(SCRIPT), *what.split())
        assert rank.wait(PATIENCE) == code, err.read_text()
    expected = fresh(tmp_path, str(SCRIPT), *what.split())
    assert expected.returncode == code
    assert out.read_text().splitlines()[1:] == expected.stdout.splitlines()[1:]
    if what != "interrupt":
        assert err.read_text() == expected.stderr


def test_ranks_outlive_it_and_their_ends_are_seen(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with process(tmp_path) as found:
        ready(found)
        rank, _, _ = forked(found, tmp_path, str(SCRIPT), "wait", str(gate))
        os.kill(found.pid, signal.SIGKILL)
        with pytest.raises(NoFork, match=r"gone \(killed by SIGKILL\)"):
            forked(found, tmp_path, str(SCRIPT))
        assert "SIGKILL" in found.gone
        assert rank.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(0.01)
        gate.touch()
        assert rank.wait(PATIENCE) == 0


def test_a_rank_that_comes_too_late_never_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_process, "FORK_LIMIT", 0.2)
    with process(tmp_path) as found:
        ready(found)
        os.kill(found.pid, signal.SIGSTOP)
        with pytest.raises(NoFork, match="did not answer"):
            forked(found, tmp_path, str(SCRIPT))
        assert found.gone
    assert (tmp_path / "out").read_text() == ""


def test_it_cannot_be_asked_before_it_is_ready(tmp_path: Path) -> None:
    with process(tmp_path) as found, pytest.raises(NoFork, match="not ready"):
        forked(found, tmp_path, str(SCRIPT))


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
            "started a thread",
        ),
        ("import subprocess\nkept = subprocess.Popen(['sleep', '99'])", "started a process"),
        ("import socket\nkept = socket.socket()", "keeps a file or a connection open"),
        ("import os\nrank = os.environ.get('RANK')", "culprit reads RANK when it is imported"),
    ],
    ids=["thread", "process", "socket", "rank"],
)
def test_what_an_import_does_may_forbid_a_fork(source: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "culprit.py").write_text(source)
    with process(tmp_path, "json", "culprit") as found, pytest.raises(NoFork, match=why):
        ready(found)


def test_a_variable_that_the_script_sets_before_its_imports_forbids_it(tmp_path: Path) -> None:
    why = "the script sets OMP_NUM_THREADS itself"
    with process(tmp_path, environment={"OMP_NUM_THREADS": "77"}) as found, pytest.raises(NoFork, match=why):
        ready(found)


def test_variables_that_imports_set_are_there_in_the_rank(tmp_path: Path) -> None:
    (tmp_path / "library.py").write_text("import os\nos.environ['SET_BY_IMPORT'] = 'yes'")
    with process(tmp_path, "library") as found:
        ready(found)
        rank, out, _ = forked(found, tmp_path, str(SCRIPT))
        assert rank.wait(PATIENCE) == 0
    assert json.loads(out.read_text().splitlines()[0])["environment"]["SET_BY_IMPORT"] == "yes"


def test_threads_of_a_library_that_looks_after_forks_are_no_hindrance(tmp_path: Path) -> None:
    program = tmp_path / "multiply.py"
    program.write_text("import numpy\nprint(float((numpy.ones((300, 300)) @ numpy.ones((300, 300))).sum()))")
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "4"}
    found = WarmProcess(COMMAND, environment, {"modules": ["numpy"], "environment": {}, "own": []})
    try:
        ready(found)
        rank, out, err = forked(found, tmp_path, str(program))
        assert rank.wait(PATIENCE) == 0, err.read_text()
    finally:
        found.close()
    assert out.read_text() == "27000000.0\n"


# -- what the launcher decides ---------------------------------------------------------------------


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(warm.SWITCH, "off")
    off = Warm()
    assert off.fork(COMMAND, {}, [0, 1, 2]) is None
    assert str(off.start) == "cold: LASTGASP_WARM=off"
    assert off.begin() == {"LASTGASP_IMPORTED": ""}
    off.close()
    monkeypatch.setenv(warm.SWITCH, "yes")
    with pytest.raises(ConfigError, match="LASTGASP_WARM"):
        Warm()


def test_a_restart_in_words() -> None:
    assert str(Start(forked=2)) == "warm"
    assert str(Start(spawned=2, why="no")) == "cold: no"
    assert str(Start(forked=1, spawned=1, why="no")) == "1 ranks warm, 1 cold: no"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("train.sh", "x"), "no Python scripts"),
        ((sys.executable, "-u", "/nowhere/train.py"), "no Python source file"),
        ((sys.executable, "-u", "-m"), "no module"),
        ((*COMMAND, "x"), ""),
        ((sys.executable, "-u", "-m", "x"), ""),
    ],
)
def test_what_can_be_forked(command: tuple[str, ...], why: str) -> None:
    assert why in Ranks(command, ()).cannot()
    assert bool(Ranks(command, ()).cannot()) == bool(why)


def test_what_each_rank_has_its_own_value_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAME", "1")
    assert Ranks(COMMAND, ({"RANK": "0", "SAME": "1"}, {"RANK": "1"})).own() == {"RANK"}


# -- what a rank reports ---------------------------------------------------------------------------


def test_libraries_are_reported_and_nothing_else() -> None:
    import support.ports as own

    modules = {"pytest": pytest, "json": json, "support.ports": own, "lastgasp.launch.warm": warm, "odd": None}
    assert list(libraries(modules)) == ["pytest", "json", "lastgasp.launch.warm"]


def test_changed_variables_are_those_that_imports_read() -> None:
    before = {"OMP_NUM_THREADS": "1", "MKL_DYNAMIC": "0", "PYTORCH_JIT": "1", "HOME": "/a"}
    now = {"OMP_NUM_THREADS": "2", "PYTORCH_JIT": "1", "HOME": "/b"}
    assert changed(before, now) == {"MKL_DYNAMIC": None, "OMP_NUM_THREADS": "2"}
