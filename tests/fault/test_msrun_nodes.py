"""Two nodes under `lastgasp run --framework mindspore`: this one, and a network name space as the other one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from lastgasp import exitcodes
from lastgasp.events import decode_incident
from lastgasp.testing.jobs import MARK, kill_marked, marked
from support.mindspore import place
from support.mindspore.job import Job
from support.ports import free_port
from support.waiting import until

TOY = place.HERE / "toy_rank.py"
LIMIT = 300.0
"""Seconds that a job with its restarts may take, on a loaded machine."""

pytestmark = [
    pytest.mark.full,
    pytest.mark.fault,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(place.missing()), reason=place.missing()),
]


@dataclass(frozen=True)
class Net:
    """The way from this machine to a name space on it.

    Attributes:
        here: this side's address; inside: what to put in front of a command to run it on the other side.
    """

    here: str
    inside: tuple[str, ...]


def ip(*words: str) -> bool:
    """Whether `ip WORDS` did it."""
    return subprocess.run(["ip", *words], capture_output=True, timeout=30, check=False).returncode == 0


@pytest.fixture
def net() -> Iterator[Net]:
    """A name space of this test's own, with one cable to it."""
    name = f"lg{uuid.uuid4().hex[:8]}"
    number = 2 + os.getpid() % 250
    if not shutil.which("ip") or not ip("netns", "add", name):
        pytest.skip("needs `ip netns add`, so iproute2 and root")
    try:
        inner, outer = f"{name}i", f"{name}o"
        done = [
            ip("link", "add", outer, "type", "veth", "peer", "name", inner),
            ip("link", "set", inner, "netns", name),
            ip("addr", "add", f"10.77.{number}.1/24", "dev", outer),
            ip("link", "set", outer, "up"),
            ip("-n", name, "addr", "add", f"10.77.{number}.2/24", "dev", inner),
            ip("-n", name, "link", "set", inner, "up"),
            ip("-n", name, "link", "set", "lo", "up"),
        ]
        if not all(done):
            pytest.skip("needs a veth pair, so the right to make one")
        yield Net(f"10.77.{number}.1", ("ip", "netns", "exec", name))
    finally:
        ip("netns", "del", name)


@contextmanager
def two_nodes(net: Net, folder: Path, *arguments: object) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One launcher on each side, one rank each; afterwards nothing of them is left."""
    data, mark = folder / "d", uuid.uuid4().hex
    data.mkdir()
    (data / "scheduler-ends").touch()
    master, control = free_port(), free_port()
    numbers = ["--worker_num=2", "--local_worker_num=1", f"--master_addr={net.here}", f"--master_port={master}"]
    script = [str(TOY), str(data), *map(str, arguments)]
    own = {"LASTGASP_CONTROLLER": f"{net.here}:{control}", "LASTGASP_TOKEN": uuid.uuid4().hex, MARK: mark}
    environ = Job(folder=folder).environment() | own
    started: list[subprocess.Popen[bytes]] = []
    with ExitStack() as files:
        try:
            for node in (0, 1):
                python = [str(place.python()), "-m", "lastgasp", "run", "--framework", "mindspore", *numbers]
                options = [f"--node_rank={node}", f"--log_dir={folder / f'msrun{node}'}"]
                log = files.enter_context((folder / f"log{node}").open("wb"))
                command = [*(net.inside if node else ()), *python, *options, *script]
                started.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log, cwd=folder))
            yield started
            until(lambda: not list(marked(MARK, mark)), "no process left")
        finally:
            kill_marked(MARK, mark)
            for process in started:
                process.wait()


def stepped(folder: Path, attempt: int) -> Callable[[], bool]:
    """Both ranks of an attempt have taken their steps."""
    return lambda: len(list((folder / "d").glob(f"stepped-*-{attempt}"))) == 2


def endings(folder: Path) -> list[tuple[str, int | None]]:
    """How the recoveries ended, oldest first."""
    found = [decode_incident(path.read_bytes()) for path in (folder / "d/incidents").glob("*.json")]
    return [(incident.ending, incident.step_saved) for incident in sorted(found, key=lambda incident: incident.id)]


@pytest.mark.parametrize("seconds", [0, 4], ids=["fast", "slow"])
def test_both_nodes_restart_in_step_and_stop_together(
    net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    """Also where the survivor on one node saves for longer than the other node would need to start anew."""
    monkeypatch.setenv("TOY_OPTIONS", json.dumps({"save_seconds": seconds}))
    with two_nodes(net, tmp_path, "die", 3) as launchers:
        codes = [launcher.wait(LIMIT) for launcher in launchers]
    logs = [(tmp_path / f"log{node}").read_text(errors="replace") for node in (0, 1)]
    assert codes == [exitcodes.NO_PROGRESS, 1], "\n".join(log[-3000:] for log in logs)
    assert endings(tmp_path)[0] == ("saved", 3)
    assert all(stepped(tmp_path, attempt)() for attempt in range(4))
    assert "the launcher of the first node has ended" in logs[1]
    assert logs[0].count("step 3 saved by rank 0") == 1
    assert logs[0].count("in step 4; step 3 is the newest") == 3
    jobs = {json.loads(path.read_text())["LASTGASP_JOB"] for path in (tmp_path / "d").glob("rank-*-[0-3]")}
    assert len(jobs) == 1


def test_a_refusal_to_start_ends_the_launchers_of_both_nodes(net: Net, tmp_path: Path) -> None:
    """The one without the controller took it for progress, and started its rank again."""
    with two_nodes(net, tmp_path, "refuse", 1) as launchers:
        codes = [launcher.wait(LIMIT) for launcher in launchers]
    logs = [(tmp_path / f"log{node}").read_text(errors="replace") for node in (0, 1)]
    assert codes == [exitcodes.REFUSED, exitcodes.REFUSED], "\n".join(log[-3000:] for log in logs)
    assert not list((tmp_path / "d").glob("rank-*-1")), "nobody has started a rank again"


def test_told_to_stop_both_nodes_say_that_the_step_was_saved(net: Net, tmp_path: Path) -> None:
    with two_nodes(net, tmp_path, "stuck", 4) as launchers:
        until(stepped(tmp_path, 0), "both ranks have stepped")
        for launcher in launchers:
            launcher.send_signal(signal.SIGTERM)
        codes = [launcher.wait(LIMIT) for launcher in launchers]
    logs = [(tmp_path / f"log{node}").read_text(errors="replace") for node in (0, 1)]
    assert codes == [exitcodes.SAVED, exitcodes.SAVED], "\n".join(log[-3000:] for log in logs)
    assert endings(tmp_path) == [("saved", 4)]
