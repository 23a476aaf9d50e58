"""New processes for missing ranks: when one may be taken in, which place it gets, and what is done where it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

from lastgasp import _clock
from lastgasp.gasp.again import NEW, Again
from lastgasp.gasp.joining import CODE, JOINS, code_of_this_process, different, order_when_taken_in, tell_code
from lastgasp.launch import growth
from lastgasp.launch.growth import MISSING, CodeFile, Growth
from support.waiting import until

OURS = {"__main__": "1", "theirs": "2"}
WAITS = "from lastgasp.gasp.joining import order_when_taken_in as take; a = take(); print(a.rank, a.members, a.takers)"


class Launcher:
    """Of four ranks on one host, of which some are missing; its new processes are real ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *missing: int) -> None:
        self.workers = [SimpleNamespace(global_rank=rank, world_size=4, id=0) for rank in range(4)]
        self.context = MagicMock(subprocess_handlers={}, _failures=dict.fromkeys(missing), _running_local_ranks=set())
        self.context.error_files = dict.fromkeys(range(4), os.devnull + "/none")
        self.code, self.program, self.processes = CodeFile(), WAITS, list[subprocess.Popen[str]]()
        group: Any = SimpleNamespace(workers=self.workers, group_world_size=1)
        self.warm = MagicMock(changed="")
        monkeypatch.setattr(growth, "replacement", self._process)
        self.growth = Growth(group, self.context, self.warm, self.code)
        members = tuple(rank for rank in range(4) if rank not in missing)
        for worker in self.workers:
            worker.global_rank = members.index(worker.global_rank) if worker.global_rank in members else MISSING
        self.growth.agreed(Again(incarnation=1, step=8, source=0, takers=missing, lost=missing, port=1,
                                 members=members))  # fmt: skip
        self.tell(code_of_this_process() | {"__main__": "none"})

    def tell(self, code: dict[str, str]) -> None:
        """A rank that is there says what it runs."""
        path = self.code.begin(True)[CODE]
        Path(path).write_bytes(msgspec.json.encode(code) + b"\n")

    def _process(self, warm: Any, context: Any, local: int, more: dict[str, str], cold: bool) -> Any:
        environment = {**os.environ, **more}
        process = subprocess.Popen([sys.executable, "-c", self.program], env=environment, stdout=subprocess.PIPE,
                                   text=True, start_new_session=True)  # fmt: skip
        self.processes.append(process)
        handler: Any = SimpleNamespace(proc=process, _stdout=None, _stderr=None)
        handler.close = lambda number: os.killpg(process.pid, number)
        return handler


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Launcher]]:
    """Makes one, and leaves no process."""
    made: list[Launcher] = []

    def make(*missing: int) -> Launcher:
        made.append(Launcher(monkeypatch, *missing))
        return made[-1]

    monkeypatch.setattr(growth, "different", lambda ours, theirs: "")
    yield make
    for one in made:
        one.growth.close()
        assert all(process.poll() is not None or process.wait(30) is not None for process in one.processes)
        for process in one.processes:
            assert process.stdout is not None
            process.stdout.close()


def test_new_processes_get_the_seats_of_those_that_are_missing(launcher: Callable[..., Launcher]) -> None:
    one = launcher(0, 2)
    assert one.growth.look("") == ()
    assert len(one.processes) == 2
    until(lambda: one.growth.look("") != (), "both are ready")
    members = one.growth.look("")
    assert members == (NEW, 0, NEW, 1)
    one.growth.agreed(Again(incarnation=2, step=9, source=0, takers=(), lost=(), port=1, members=members))
    assert [one.workers[local].global_rank for local in (0, 2)] == [0, 2]
    assert (one.context._failures, one.context._running_local_ranks) == ({}, {0, 2})
    assert [process.communicate(timeout=60)[0] for process in one.processes] == [
        f"{rank} {members} (0, 2)\n" for rank in (0, 2)
    ]
    for local, worker in enumerate(one.workers):
        worker.global_rank = local
    assert one.growth.look("") == (), "nobody is missing any more"


def test_an_order_for_others_or_for_who_is_gone_changes_numbers_alone(launcher: Callable[..., Launcher]) -> None:
    one = launcher(3)
    grown = Again(incarnation=2, step=9, source=0, takers=(), lost=(), port=1, members=(0, 1, 2, NEW))
    until(lambda: one.growth.look("") != (), "it is ready")
    one.growth.look("not now")
    one.growth.agreed(grown)
    assert (one.workers[3].global_rank, one.context.subprocess_handlers) == (MISSING, {})
    one.growth.agreed(msgspec.structs.replace(grown, members=(0, 1, 2, 3, NEW, NEW)))
    one.growth.agreed(msgspec.structs.replace(grown, members=(0, 1, 2, 3, 5), lost=(4,)))
    assert len(one.growth._seats) == 5


@pytest.mark.parametrize("trouble", ["ends", "other code", "refused", "late", "changed"])
def test_who_cannot_be_taken_in_is_ended_and_not_tried_again(
    trouble: str, launcher: Callable[..., Launcher], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = launcher(3)
    if trouble == "ends":
        one.program = "raise SystemExit(5)"
    if trouble == "other code":
        monkeypatch.setattr(growth, "different", lambda ours, theirs: "it runs other code")
    if trouble == "changed":
        one.warm.changed = "train.py has changed"
    one.growth.look("")
    if trouble == "late":
        monkeypatch.setattr(growth, "START", -1.0)
        assert _clock.monotonic() > 0
    until(lambda: not one.growth.look("not every rank can be" if trouble == "refused" else "") and not (
        one.growth._coming), "it is given up")  # fmt: skip
    said = {"ends": "exited with code 5", "other code": "it runs other code", "refused": "not every rank can be",
            "late": "it has not come to its training", "changed": "train.py has changed"}  # fmt: skip
    assert said[trouble] in caplog.text and "rank 3 stays missing" in caplog.text
    assert one.growth.look("") == ()
    assert len(one.processes) == (0 if trouble == "changed" else 1)


def test_who_waits_ends_with_its_launcher(launcher: Callable[..., Launcher]) -> None:
    one = launcher(1)
    until(lambda: one.growth.look("") != (), "it is ready")
    [newcomer] = one.growth._coming.values()
    one.growth._coming.clear()
    newcomer._close()
    assert one.processes[0].communicate(timeout=60)[0] == ""
    assert one.processes[0].returncode == 0


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (OURS, ""),
        ({"__main__": "1", "more": "3"}, ""),
        ({"__main__": "0"}, "other code than the ranks that are there (the script)"),
        ({"__main__": "1", "theirs": "0"}, "(theirs)"),
        ({"theirs": "2"}, "it is not known"),
    ],
)
def test_code_is_the_same_where_all_that_both_have_is(theirs: dict[str, str], said: str) -> None:
    assert (said in different(OURS, theirs)) if said else different(OURS, theirs) == ""
    assert "it is not known" in different({}, theirs)


def test_a_rank_says_what_it_runs_once_and_only_where_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    code = CodeFile()
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)  # a worker of xdist has none
    monkeypatch.setenv(CODE, code.begin(False)[CODE])
    tell_code()
    assert code.said == {}
    tell_code(asked=True)
    assert code.said
    monkeypatch.setenv(CODE, code.begin(True)[CODE])
    tell_code()
    found = code.said
    assert found["version of lastgasp"] and __name__ in found and "pytest" not in found and "os" not in found
    assert different(found, code_of_this_process()) == ""
    assert JOINS not in os.environ


def test_ranks_of_another_user_than_the_launcher_stay_missing_and_the_launcher_says_why(
    launcher: Callable[..., Launcher], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The new process could not open what its launcher offers; it ended with 0, and that was all that was said."""
    assert growth._user_of(os.getpid()) == os.geteuid() and growth._user_of(2**22 + 1) is None
    one = launcher(3)
    one.workers[0].id = os.getpid()
    monkeypatch.setattr(growth, "_user_of", lambda pid: 65534)
    with caplog.at_level("WARNING", "lastgasp.launch"):
        assert one.growth.look("") == one.growth.look("") == ()
    [said] = caplog.messages
    assert "rank 3 stays missing" in said and "its ranks run as user 65534, and the launcher as user" in said
    assert one.processes == []


def test_a_process_that_may_not_read_its_order_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(path: str, *more: Any, **named: Any) -> Any:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setenv(JOINS, f"0 /proc/{os.getpid()}/fd/3 /proc/{os.getpid()}/fd/4")
    monkeypatch.setattr("builtins.open", denied)
    with pytest.raises(SystemExit) as ends:
        order_when_taken_in()
    assert ends.value.code == 1 and "cannot be taken in: this process runs as user" in capsys.readouterr().err
