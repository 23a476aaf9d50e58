"""The warm process without torch: what is forked from it is as a fresh interpreter, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lastgasp.errors import ConfigError
from lastgasp.gasp.imported import TEMPLATES, VARIABLE, Imported, changed, libraries, origin, report
from lastgasp.launch import forked as forked_module
from lastgasp.launch import warm, warm_checks, warm_process, warm_server
from lastgasp.launch.forked import ForkedProcess
from lastgasp.launch.warm import Ranks, Start, Warm
from lastgasp.launch.warm_process import NoFork, WarmProcess, order_for
from support.waiting import until

SCRIPT = Path(__file__).parents[1] / "support" / "interpreter.py"
COMMAND = [sys.executable, "-u", str(SCRIPT)]
ALIKE = ("pid", "parent", "draws", "environment")
"""Facts that are each process's own, or compared apart."""
PATIENCE = 150.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork may take as long as it likes."""
    monkeypatch.setattr(warm_process, "FORK_LIMIT", PATIENCE)


@contextmanager
def process(folder: Path, *modules: str, **plan: Any) -> Iterator[WarmProcess]:
    """A warm process that finds its modules also in `folder`, as libraries."""
    environment = os.environ | {"PYTHONPATH": paths(folder), "LASTGASP_ROUND": "0" * 16}
    whole = {"modules": reported(folder, *modules), "environment": {}, "own": ["RANK"], "command": COMMAND} | plan
    found = WarmProcess(COMMAND, environment, whole)
    try:
        yield found
    finally:
        found.close()


def reported(folder: Path, *modules: str) -> dict[str, str]:
    """As a rank reports them that has imported `modules`; those of `folder` count as libraries."""
    found = {name: spec.origin or "" for name in modules if (spec := importlib.util.find_spec(name)) is not None}
    return {name: found.get(name) or str(folder / "site-packages" / f"{name}.py") for name in modules}


def paths(folder: Path) -> str:
    """Where ranks look for modules besides."""
    return os.pathsep.join(map(str, (folder / "site-packages", SCRIPT.parents[1])))


def library(folder: Path, name: str, source: str) -> None:
    """A module that ranks find."""
    place = folder / "site-packages"
    place.mkdir(exist_ok=True)
    (place / f"{name}.py").write_text(source)


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
    environment = os.environ | {"PYTHONPATH": paths(folder), "LASTGASP_ROUND": "1" * 16} | more
    with open(os.devnull) as null, out.open("w") as stdout, err.open("w") as stderr:
        order = order_for([*COMMAND[:2], *command], environment)
        return found.fork(order, [null.fileno(), stdout.fileno(), stderr.fileno()]), out, err


def fresh(folder: Path, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    """The same in an interpreter of its own."""
    environment = os.environ | {"PYTHONPATH": paths(folder), "LASTGASP_ROUND": "1" * 16} | more
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


def test_what_warm_processes_take_is_known_to_others(tmp_path: Path) -> None:
    """To `lastgasp doctor`; a rank that was forked is none."""
    proc = tmp_path / "proc"  # without those of other tests
    proc.mkdir()
    with process(tmp_path, "json") as found:
        memory = ready(found)
        gate = tmp_path / "gate"
        rank, out, _ = forked(found, tmp_path, str(SCRIPT), "wait", str(gate))
        until(lambda: bool(out.read_text()), "the rank to be what it was forked for")
        for pid in (os.getpid(), found.pid, rank.pid):
            (proc / str(pid)).symlink_to(f"/proc/{pid}")
        taken, count = warm_process.in_use(proc)
        gate.touch()
        assert (count, rank.wait(PATIENCE)) == (1, 0)
        assert 0.3 * memory < taken < 3 * memory


def test_two_ranks_draw_other_random_numbers(tmp_path: Path) -> None:
    with process(tmp_path, "random", "multiprocessing") as found:
        ready(found)
        draws = []
        for _ in range(2):
            rank, out, _ = forked(found, tmp_path, str(SCRIPT))
            assert rank.wait(PATIENCE) == 0
            draws += json.loads(out.read_text().splitlines()[0])["draws"]
    assert len(set(draws)) == 4


def test_a_generator_of_a_library_begins_anywhere_in_each_rank_unless_it_has_a_seed(tmp_path: Path) -> None:
    library(tmp_path, "drawing", "import random\nfree, seeded = random.Random(), random.Random(7)")
    program = tmp_path / "draw.py"
    program.write_text("import drawing; print(drawing.free.random(), drawing.seeded.random())\n")
    with process(tmp_path, "drawing") as found:
        ready(found)
        draws = []
        for _ in range(2):
            rank, out, err = forked(found, tmp_path, str(program))
            assert rank.wait(PATIENCE) == 0, err.read_text()
            draws.append(out.read_text().split())
    (one, seeded), (other, also) = draws
    assert one != other
    assert seeded == also == str(random.Random(7).random())


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


def test_a_forked_rank_can_all_that_the_launcher_asks_of_a_process() -> None:
    folder = Path(forked_module.__file__).parent
    torchs = importlib.util.find_spec("torch.distributed.elastic.multiprocessing")
    folders = [folder, *(torchs.submodule_search_locations or () if torchs is not None else ())]
    sources = [path.read_text() for one in folders for path in Path(one).rglob("*.py")]
    asked = {name for source in sources for name in re.findall(r"handler\.proc\.(\w+)", source)}
    assert asked > {"poll", "pid"}
    assert {name for name in asked if not hasattr(ForkedProcess, name)} <= {"pid", "returncode"}
    with subprocess.Popen(["sleep", "60"]) as one:
        rank = ForkedProcess(one.pid)
        rank.kill()
        assert rank.wait(PATIENCE) == -signal.SIGKILL
        rank.kill()  # of no effect


def test_two_threads_may_look_at_a_forked_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's main thread, and the one that forwards signals."""
    real, looked, go = os.waitpid, threading.Event(), threading.Event()

    def slow(pid: int, options: int) -> tuple[int, int]:
        found = real(pid, options)
        looked.set()
        assert go.wait(PATIENCE)
        return found

    with subprocess.Popen(["true"]) as one:
        os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)
        rank = ForkedProcess(one.pid)
        monkeypatch.setattr(forked_module.os, "waitpid", slow)  # type: ignore[attr-defined]
        other = threading.Thread(target=rank.poll)
        other.start()
        assert looked.wait(PATIENCE)
        try:
            assert rank.poll() is None, "the other thread has not said it yet"
        finally:
            go.set()
            other.join()
            monkeypatch.undo()
        assert rank.poll() == 0


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


FOLDER = "import tempfile\nkept = tempfile.TemporaryDirectory()"


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
        ("import os\nkept = dict(os.environ)", "culprit reads RANK when it is imported"),
        ("import tempfile\nkept = tempfile.mkdtemp()", "made a temporary file"),
        ("import tempfile\nkept = tempfile.NamedTemporaryFile(delete=False).name", "made a temporary file"),
        (f"{FOLDER}\nplace = kept.name + '/media'", "made a temporary file"),
        (f"{FOLDER}\nset = {{'place': kept.name}}", "made a temporary file"),
        (f"{FOLDER}\nopen(kept.name + '/x', 'w').close()", "made a temporary file"),
        ("import tempfile\nname = next(tempfile._get_candidate_names())", "made a temporary file"),
    ],
    ids=["thread", "process", "socket", "rank", "environment", "folder", "file", "taken", "kept", "filled", "name"],
)
def test_what_an_import_does_may_forbid_a_fork(source: str, why: str, tmp_path: Path) -> None:
    library(tmp_path, "culprit", source)
    with process(tmp_path, "json", "culprit") as found, pytest.raises(NoFork, match=why):
        ready(found)


def test_a_library_that_keeps_itself_open_is_no_hindrance(tmp_path: Path) -> None:
    """As libffi does from Debian 13 on, in each process that has imported ctypes."""
    library(tmp_path, "closures", "import _ctypes, os\nkept = os.open(_ctypes.__file__, os.O_RDONLY)")
    with process(tmp_path, "closures") as found:
        ready(found)


def test_temporary_files_that_are_gone_again_are_no_hindrance(tmp_path: Path) -> None:
    """As those in which Triton compiles, for imports that ask it for a GPU. Each rank takes names of its own."""
    using = "with tempfile.TemporaryDirectory() as folder:\n    tempfile.NamedTemporaryFile(dir=folder).close()"
    library(tmp_path, "compiled", f"import os, tempfile\n{using}\nnumber, name = tempfile.mkstemp()\n"
            "os.close(number)\nos.replace(name, name + '.o')\nos.remove(name + '.o')")  # fmt: skip
    script = tmp_path / "names.py"
    script.write_text("import tempfile\nprint(tempfile._name_sequence, next(tempfile._get_candidate_names()))")
    with process(tmp_path, "compiled") as found:
        ready(found)
        said = []
        for _ in range(2):
            rank, out, err = forked(found, tmp_path, str(script))
            assert rank.wait(PATIENCE) == 0, err.read_text()
            said.append(out.read_text().split())
    assert [one[0] for one in said] == ["None", "None"] and said[0][1] != said[1][1]


@pytest.mark.parametrize("more", ["", "gc.set_threshold(5000)", "gc.disable()"])
def test_garbage_is_not_looked_for_while_it_imports_and_is_in_ranks_as_ever(more: str, tmp_path: Path) -> None:
    library(tmp_path, "imported", f"import gc\nthen = gc.get_threshold()[0]\n{more}")
    script = tmp_path / "says.py"
    script.write_text("import gc, imported\nprint(imported.then, gc.isenabled(), gc.get_threshold())")
    with process(tmp_path, "imported") as found:
        ready(found)
        rank, out, err = forked(found, tmp_path, str(script))
        assert rank.wait(PATIENCE) == 0, err.read_text()
    expected = fresh(tmp_path, str(script)).stdout.split(maxsplit=1)
    assert expected[0] != "0" and out.read_text().split(maxsplit=1) == ["0", expected[1]]


def test_a_temporary_folder_that_only_its_object_knows_is_made_anew_in_each_rank(tmp_path: Path) -> None:
    """As wandb's two, which it makes when it is imported. Each process removes its own at its end, and only that."""
    folders = tmp_path / "temporary"
    folders.mkdir()
    library(tmp_path, "media", f"import tempfile\nmedia = tempfile.TemporaryDirectory('-media', dir={str(folders)!r})")
    script = tmp_path / "uses.py"
    script.write_text("import media, os, sys\nprint(media.media.name, os.listdir(os.path.dirname(media.media.name)))\n"
                      "open(media.media.name + '/one', 'w').close()\n")  # fmt: skip
    with process(tmp_path, "media") as found:
        ready(found)
        assert not list(folders.iterdir())
        said = []
        for _ in range(2):
            rank, out, err = forked(found, tmp_path, str(script))
            assert rank.wait(PATIENCE) == 0, err.read_text()
            assert "ResourceWarning" not in err.read_text()
            said.append(out.read_text().split(maxsplit=1))
            assert not list(folders.iterdir())
    assert said[0][0] != said[1][0] and all(one[1].strip() == str([os.path.basename(one[0])]) for one in said)


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "TORCH_DISTRIBUTED_DEBUG"])
def test_a_variable_that_the_script_sets_before_its_imports_forbids_it(name: str, tmp_path: Path) -> None:
    why = f"the script sets {name} itself"
    with process(tmp_path, environment={name: "77"}) as found, pytest.raises(NoFork, match=why):
        ready(found)


@pytest.mark.parametrize("read", ["os.environ.get('HOME_OF_MODELS')", "os.getenv('HOME_OF_MODELS', 'x')",
                                  "'HOME_OF_MODELS' in os.environ"])  # fmt: skip
def test_any_variable_of_the_script_that_an_import_reads_forbids_it(read: str, tmp_path: Path) -> None:
    library(tmp_path, "hub", f"import os\nHOME = {read}")
    changed = {"HOME_OF_MODELS": "/elsewhere", "NOBODY_READS": "1"}
    why = "the script sets HOME_OF_MODELS itself, which hub reads"
    with process(tmp_path, "hub", environment=changed) as found, pytest.raises(NoFork, match=why):
        ready(found)


def test_variables_that_no_import_reads_are_no_hindrance(tmp_path: Path) -> None:
    library(tmp_path, "sets", "import os\nos.environ['SET'] = '1'\nread = os.environ['SET']")
    with process(tmp_path, "sets", environment={"NOBODY_READS": "1", "SET": "1"}) as found:
        ready(found)


def test_code_that_takes_variables_by_a_prefix_reads_only_those(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(warm_checks.BY_PREFIX, "support.reads_all", "OURS_")
    source = "import os\nfound = {name for name in os.environ if name.startswith('OURS_')}"
    with warm_checks.watching_environment({"RANK", "OURS_X"}) as readers:
        exec(compile(source, "<reads_all>", "exec"), {"__name__": "support.reads_all"})
        exec(compile(source, "<others>", "exec"), {"__name__": "others"})
    assert readers[0] == ("support.reads_all", "OURS_X")
    assert sorted(readers[1:]) == [("others", "OURS_X"), ("others", "RANK")]


def test_a_module_of_the_user_that_comes_before_a_librarys_forbids_it(tmp_path: Path) -> None:
    library(tmp_path, "shapes", "sides = 4")
    library(tmp_path, "drawing", "import shapes")
    modules = reported(tmp_path, "drawing") | {"shapes": "/home/me/shapes.py"}
    why = "shapes is /home/me/shapes.py in the ranks, and .*/site-packages/shapes.py to other imports"
    with process(tmp_path, modules=modules) as found, pytest.raises(NoFork, match=why):
        ready(found)


def test_a_second_name_that_the_first_import_takes_forbids_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Cython gives it to `pandas._libs._cyutility` and `scipy._cyutility`."""
    monkeypatch.setitem(sys.modules, "_shared", json.decoder)
    other = {"other": "/lib/other/__init__.py", "other._shared": "/lib/other/_shared.so"}
    ours = {"json.decoder": str(json.decoder.__file__)}
    assert warm_checks.differing({**ours, **other, "_shared": "/lib/other/_shared.so"}) == ""
    found = warm_checks.differing({**ours, "_shared": "/home/me/_shared.py"})
    assert found.startswith("_shared is /home/me/_shared.py in the ranks")


def test_what_has_been_installed_since_is_not_forked_from(tmp_path: Path) -> None:
    library(tmp_path, "before", "")
    with process(tmp_path, "before") as found:
        ready(found)
        library(tmp_path, "after", "")
        with pytest.raises(NoFork, match=r"site-packages has changed since it was imported"):
            forked(found, tmp_path, str(SCRIPT))
        found._process.wait(PATIENCE)
        assert found.gone


def test_a_module_of_the_user_that_a_library_has_imported_is_not_forked_from_once_it_is_edited(tmp_path: Path) -> None:
    library(tmp_path, "framework", f"import sys\nsys.path.append({str(tmp_path)!r})\nimport plug")
    (tmp_path / "plug.py").write_text("x = 1")
    with process(tmp_path, "framework") as found:
        ready(found)
        forked(found, tmp_path, str(SCRIPT))[0].wait(PATIENCE)
        (tmp_path / "plug.py").write_text("x = 2")
        with pytest.raises(NoFork, match=r"plug.py has changed since it was imported"):
            forked(found, tmp_path, str(SCRIPT))


def test_a_library_that_keeps_main_and_the_arguments_at_an_import_keeps_the_ranks(tmp_path: Path) -> None:
    library(tmp_path, "keeps", "import __main__, sys\nmain, line, file = __main__, list(sys.argv), __main__.__file__")
    program = tmp_path / "program.py"
    program.write_text(
        "import keeps, sys\nassert keeps.main is sys.modules['__main__']\nprint(keeps.line, keeps.file)"
    )
    command = [*COMMAND[:2], str(program), "--a"]
    with process(tmp_path, "keeps", command=command) as found:
        ready(found)
        rank, out, err = forked(found, tmp_path, *command[2:])
        assert rank.wait(PATIENCE) == 0, err.read_text()
    assert out.read_text() == fresh(tmp_path, *command[2:]).stdout == f"{command[2:]} {program}\n"


TEMPLATES_OF_TORCH = """
import atexit, importlib, os, sys, tempfile
_TEMP_DIR = tempfile.TemporaryDirectory()
INSTANTIATED_TEMPLATE_DIR_PATH = _TEMP_DIR.name
atexit.register(_TEMP_DIR.cleanup)
sys.path.append(INSTANTIATED_TEMPLATE_DIR_PATH)
def instantiate_non_scriptable_remote_module_template():
    with open(os.path.join(INSTANTIATED_TEMPLATE_DIR_PATH, "_remote_module_non_scriptable.py"), "w") as file:
        file.write("found = 3")
    importlib.invalidate_caches()
    return importlib.import_module("_remote_module_non_scriptable")
"""
REMOTE_MODULES = """
import importlib, os, sys, types
sys.modules["torch.distributed.nn.jit"] = types.ModuleType("torch.distributed.nn.jit")
sys.modules["torch.distributed.nn.jit"].__path__ = [os.path.dirname(__file__)]
module = importlib.import_module("torch.distributed.nn.jit.instantiator")
template = module.instantiate_non_scriptable_remote_module_template()
sys.path.append("/behind")
"""


def test_each_rank_has_its_own_folder_for_the_remote_modules_of_torch_2_7(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks report other files of it than the warm process has; none is left, also where that is killed."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    library(tmp_path, "instantiator", TEMPLATES_OF_TORCH)
    library(tmp_path, "remote", REMOTE_MODULES)
    program = tmp_path / "program.py"
    program.write_text(
        "import os, remote, sys; from lastgasp.gasp.imported import origin\n"
        "folder = remote.module.INSTANTIATED_TEMPLATE_DIR_PATH\n"
        "print(folder, sys.path.index(folder) - len(sys.path), sum('/scratch/' in one for one in sys.path),\n"
        "      os.path.isfile(os.path.join(folder, '_remote_module_non_scriptable.py')), remote.template.found,\n"
        "      os.path.dirname(remote.template.__file__) == folder, [origin(remote.template)])"
    )
    modules = reported(tmp_path, "remote") | {TEMPLATES: str(tmp_path / "site-packages" / "instantiator.py")}
    with process(tmp_path, modules=modules) as found:
        ready(found)
        assert list(scratch.iterdir()) == []
        facts = []
        for _ in range(2):
            rank, out, err = forked(found, tmp_path, str(program))
            assert rank.wait(PATIENCE) == 0, err.read_text()
            facts.append(out.read_text().split(maxsplit=1))
    alone = fresh(tmp_path, str(program)).stdout.split(maxsplit=1)
    assert len({folder for folder, _ in [*facts, alone]}) == 3
    assert [rest for _, rest in facts] == [alone[1]] * 2
    assert list(scratch.iterdir()) == []


def test_variables_that_were_set_before_the_first_import_are_there_in_the_rank(tmp_path: Path) -> None:
    library(tmp_path, "sitecustomize", "import os\nos.environ['SET_BY_SITE'] = 'yes'")
    with process(tmp_path) as found:
        ready(found)
        rank, out, err = forked(found, tmp_path, str(SCRIPT))
        assert rank.wait(PATIENCE) == 0, err.read_text()
    assert json.loads(out.read_text().splitlines()[0])["environment"]["SET_BY_SITE"] == "yes"


def test_variables_that_imports_set_are_there_in_the_rank(tmp_path: Path) -> None:
    library(tmp_path, "sets", "import os\nos.environ['SET_BY_IMPORT'] = 'yes'")
    with process(tmp_path, "sets") as found:
        ready(found)
        rank, out, _ = forked(found, tmp_path, str(SCRIPT))
        assert rank.wait(PATIENCE) == 0
    assert json.loads(out.read_text().splitlines()[0])["environment"]["SET_BY_IMPORT"] == "yes"


def test_threads_of_a_library_that_looks_after_forks_are_no_hindrance(tmp_path: Path) -> None:
    program = tmp_path / "multiply.py"
    program.write_text("import numpy\nprint(float((numpy.ones((300, 300)) @ numpy.ones((300, 300))).sum()))")
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "4"}
    found = WarmProcess(COMMAND, environment, {"modules": reported(tmp_path, "numpy"), "environment": {}, "own": [],
                                                "command": COMMAND})  # fmt: skip
    try:
        ready(found)
        rank, out, err = forked(found, tmp_path, str(program))
        assert rank.wait(PATIENCE) == 0, err.read_text()
    finally:
        found.close()
    assert out.read_text() == "27000000.0\n"


JEMALLOC = """
import threading
named = threading.Event()
def give_back():
    with open("/proc/thread-self/comm", "w") as file:
        file.write("jemalloc_bg_thd")
    named.set()
    threading.Event().wait()
threading.Thread(target=give_back, daemon=True).start()
named.wait()
"""


def test_the_thread_by_which_jemalloc_gives_memory_back_is_no_hindrance(tmp_path: Path) -> None:
    """It is there wherever pyarrow is imported: by `datasets`, and so by Hugging Face's Trainer."""
    library(tmp_path, "pool", JEMALLOC)
    with process(tmp_path, "pool") as found:
        ready(found)
        rank, _, err = forked(found, tmp_path, str(SCRIPT), "exit", "3")
        assert rank.wait(PATIENCE) == 3, err.read_text()


# -- what the launcher decides ---------------------------------------------------------------------


def test_paths_and_variables_that_are_not_utf8_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    one, odd = Warm(why=""), os.fsdecode(b"caf\xe9")
    monkeypatch.setenv(VARIABLE, one.begin()[VARIABLE])
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("ODD", odd)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", f"/tmp/{odd}/train.py", raising=False)
    report()
    found = one._reported()
    assert found is not None
    assert (found.modules["__main__"], found.environment["ODD"]) == (f"/tmp/{odd}/train.py", odd)
    one.close()


def test_what_is_no_report_costs_the_warm_process_and_not_the_job(tmp_path: Path) -> None:
    for line in (b"{\n", b"[]\n", b'{"modules": 1}\n', b"\xff\n"):
        one = Warm(why="")
        Path(one.begin()[VARIABLE]).write_bytes(line)
        one.look(Ranks(COMMAND, ()))
        assert "cannot be read" in one.why, line
        one.close()


@pytest.mark.parametrize("given", [None, "0"])
def test_imports_that_ask_torch_for_a_gpu_do_not_take_it(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a CUDA context no fork could use the GPU; what the user has set stays."""
    name, made = "PYTORCH_NVML_BASED_CUDA_CHECK", list[Mapping[str, str]]()
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    monkeypatch.setattr(warm, "WarmProcess", lambda command, environment, plan: made.append(environment))
    Warm(why="")._prepare(Ranks(COMMAND, ()), Imported(modules={}, environment={}))
    assert made[0][name] == (given or "1")


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
        (("train.sh", "x"), "not Python scripts"),
        ((sys.executable, "-u", "/nowhere/train.py"), "not a Python source file"),
        ((sys.executable, "-u", "-m"), "no module"),
        ((*COMMAND, "x"), ""),
        ((sys.executable, "-u", "-m", "x"), ""),
    ],
)
def test_what_can_be_forked(command: tuple[str, ...], why: str) -> None:
    assert why in Ranks(command, ()).cannot()
    assert bool(Ranks(command, ()).cannot()) == bool(why)


def test_what_each_rank_has_its_own_value_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MASTER_PORT", "1")  # as a cluster sets it: torchrun's may be another the next time
    same = {"MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}
    assert Ranks(COMMAND, ({"RANK": "0", **same}, {"RANK": "1", **same})).own() == {"RANK", "MASTER_PORT"}


# -- what a rank reports ---------------------------------------------------------------------------


def test_libraries_are_reported_and_nothing_else() -> None:
    import support.ports as own

    modules = {"pytest": pytest, "json": json, "support.ports": own, "lastgasp.launch.warm": warm, "odd": None}
    found = {name: origin(module) for name, module in modules.items()}
    assert list(libraries(found)) == ["pytest", "json", "lastgasp.launch.warm"]


def test_changed_variables() -> None:
    before = {"OMP_NUM_THREADS": "1", "MKL_DYNAMIC": "0", "PYTORCH_JIT": "1"}
    assert changed(before, {"OMP_NUM_THREADS": "2", "PYTORCH_JIT": "1", "NEW": "x"}) == {
        "MKL_DYNAMIC": None, "NEW": "x", "OMP_NUM_THREADS": "2",
    }  # fmt: skip


def test_a_sandbox_that_forbids_oom_scores_does_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With /proc mounted read-only the process ended at its start."""
    score = tmp_path / "score"
    score.write_text("5\n")
    monkeypatch.setattr(warm_server, "OOM_SCORE", str(score))
    assert warm_server._ended_first("1000") == "5\n" and score.read_text().endswith("1000")
    monkeypatch.setattr(warm_server, "OOM_SCORE", str(tmp_path / "nowhere" / "score"))
    assert warm_server._ended_first("1000") == ""
    warm_server._ended_first("")


def test_a_rank_that_is_not_replaced_gets_the_reason_of_now() -> None:
    """And not that for which the attempt's ranks had been started anew."""
    one = Warm(why="")
    try:
        assert one.fork(COMMAND, {}, ()) is None and one.start.why == warm.NOT_YET == one.refused
        one._lost = "the warm process is gone (killed by SIGKILL)"
        assert one.fork(COMMAND, {}, ()) is None
        assert (one.refused, one.start.why) == ("the warm process is gone (killed by SIGKILL)", warm.NOT_YET)
    finally:
        one.close()
