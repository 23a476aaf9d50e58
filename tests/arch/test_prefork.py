"""What `subprocess.Popen` gets from an image is as what it would have started (tests/support/prefork)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lastgasp.testing.jobs import ends_with_its_parent, read_proc, run_job
from support import prefork
from support.prefork import Prefork, client

SCRIPT = Path(prefork.__file__).parents[1] / "prefork_child.py"
OWN = ("pid", "draws", "original")
"""Facts that no two processes share; a forked one's original command line always has a -u."""


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Prefork]:
    """Images of this test's own, whatever the run has; what is done goes to `log`."""
    monkeypatch.setattr(prefork.images, "on", False)
    monkeypatch.delenv("TESTS_COLD", raising=False)
    monkeypatch.setenv("TESTS_PREFORK_LOG", str(tmp_path / "log"))
    with prefork.installed(Prefork()) as found:
        yield found


def ended(path: Path, *more: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """One process, to its end."""
    options["env"] = os.environ | {"ODD": os.fsdecode(b"\xff")} | options.get("env", {})
    command = [sys.executable, str(SCRIPT), str(path), *more]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120, **options)


def facts(path: Path) -> dict[str, Any]:
    """What a process has written about itself."""
    found: dict[str, Any] = json.loads(path.read_text())
    found["descriptors"] = [name for name in found["descriptors"] if not name.startswith("socket:")]  # to an image
    return {name: value for name, value in found.items() if name not in OWN}


@pytest.mark.parametrize(
    "options", [{}, {"start_new_session": True}, {"preexec_fn": ends_with_its_parent}], ids=["plain", "session", "ends"]
)
def test_a_forked_process_is_as_a_fresh_one(options: dict[str, Any], images: Prefork, tmp_path: Path) -> None:
    options = options | {"cwd": tmp_path}
    done = ended(tmp_path / "facts", **options)
    forked = facts(tmp_path / "facts")
    images.on = False
    expected = ended(tmp_path / "facts", **options)
    assert images.counts == {"forked: bare": 1}
    assert (done.returncode, done.stdout, done.stderr) == (0, expected.stdout, expected.stderr) == (0, "written\n", "")
    assert forked == facts(tmp_path / "facts")


@pytest.mark.parametrize(
    ("what", "code"), [("exit 3", 3), ("die 5", 5), ("raise x", 1), ("signal 9", -9), ("signal 15", -15)]
)
def test_it_ends_as_a_fresh_one(what: str, code: int, images: Prefork, tmp_path: Path) -> None:
    done = ended(tmp_path / "facts", *what.split())
    images.on = False
    expected = ended(tmp_path / "facts", *what.split())
    assert images.counts == {"forked: bare": 1}
    assert done.returncode == expected.returncode == code
    assert done.stderr == expected.stderr


def test_what_it_starts_is_forked_along(images: Prefork, tmp_path: Path) -> None:
    assert ended(tmp_path / "facts", "again").returncode == 0
    lines = (tmp_path / "log").read_text().splitlines()
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("facts", "facts.again"))
    assert sorted(lines) == sorted([f"{os.getpid()} forked: bare", f"{first['pid']} forked: bare"])
    assert (first["parent"], second["parent"]) == (os.getpid(), first["pid"])
    assert second["argv"] == [str(SCRIPT), str(tmp_path / "facts.again")]


def test_a_job_is_forked(images: Prefork, tmp_path: Path) -> None:
    """Half of all the tests' jobs are made by this function: what it asks of Popen must be what an image can do."""
    assert run_job([sys.executable, str(SCRIPT), str(tmp_path / "facts")], tmp_path / "job", timeout=120).ok
    assert images.counts == {"forked: bare": 1}


def test_it_is_found_by_its_environment(images: Prefork, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    command = [sys.executable, str(SCRIPT), str(tmp_path / "facts"), "wait", str(gate)]
    environ = os.environ | {"LASTGASP_JOB_MARK": "mine"}
    with subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        assert b"LASTGASP_JOB_MARK=mine" in read_proc(str(process.pid), "environ").split(b"\0")
        assert read_proc(str(process.pid), "cmdline").rstrip(b"\0").split(b"\0") == [w.encode() for w in command]
        gate.touch()
        assert process.wait(120) == 0
    assert images.counts == {"forked: bare": 1}


def test_a_command_behind_envs_folder_is_forked_there(images: Prefork, tmp_path: Path) -> None:
    command, environment = ["env", "-C", str(tmp_path), sys.executable, str(SCRIPT), "facts"], dict(os.environ)
    for on in (True, False):
        images.on = on
        subprocess.run(command, check=True, env=environment, stdin=subprocess.DEVNULL, timeout=120)
        (tmp_path / "facts").rename(tmp_path / f"facts-{on}")
    assert images.counts == {"forked: bare": 1}
    assert facts(tmp_path / "facts-True") == facts(tmp_path / "facts-False")


@pytest.mark.parametrize(("backend", "forked"), [("embedded", 1), ("ascend", 0)])
def test_toy_ranks_that_start_a_controller_are_not_forked(
    backend: str, forked: int, images: Prefork, tmp_path: Path
) -> None:
    command = [sys.executable, str(SCRIPT.with_name("engine_worker.py"))]  # ends at once: its options are missing
    environment = os.environ | {"LASTGASP_BACKEND": backend}
    subprocess.run(command, env=environment, capture_output=True, stdin=subprocess.DEVNULL, timeout=120)
    assert images.counts["forked: toy"] == forked


def test_another_value_of_what_is_read_at_a_start_is_no_fork(images: Prefork, tmp_path: Path) -> None:
    assert ended(tmp_path / "facts").returncode == 0
    done = ended(tmp_path / "facts", env={"PYTHONHASHSEED": "7"})
    assert done.returncode == 0
    assert facts(tmp_path / "facts")["environment"]["PYTHONHASHSEED"] == "7"
    assert images.counts == {
        "forked: bare": 1, "cold: PYTHONHASHSEED is read by interpreter or libraries: bare": 1
    }  # fmt: skip


def test_an_image_that_dies_costs_nothing(images: Prefork, tmp_path: Path) -> None:
    assert ended(tmp_path / "facts").returncode == 0
    [image] = images.processes()
    os.kill(image, signal.SIGKILL)
    os.waitid(os.P_PID, image, os.WEXITED | os.WNOWAIT)
    assert ended(tmp_path / "facts").returncode == 0
    assert ended(tmp_path / "facts").returncode == 0
    assert sorted(images.counts.values()) == [1, 2]
    assert images.counts["forked: bare"] == 2


def test_what_cannot_become_what_was_asked_for_costs_nothing(
    images: Prefork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_ignored", lambda: {int(signal.SIGKILL)})
    assert ended(tmp_path / "facts", "again").returncode == 0
    assert images.counts == {"cold: OSError: [Errno 22] Invalid argument: bare": 1}


@pytest.mark.cold
def test_a_cold_test_forks_nothing() -> None:
    assert not prefork.images.on
