"""`lastgasp run --framework`: the command line that starts a plugin before the script; what dead workers leave."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lastgasp.errors import ConfigError
from lastgasp.launch import orphans
from lastgasp.launch.framework import split_framework
from support.waiting import until

run = pytest.importorskip("torch.distributed.run", reason="needs torch: pip install 'lastgasp[megatron]'")

START = ["-m", "lastgasp_megatron.start"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["--framework", "megatron", "pretrain.py"], [*START, "pretrain.py"]),
        (["--framework=megatron", "pretrain.py", "--x", "1"], [*START, "pretrain.py", "--x", "1"]),
        (
            ["--nproc-per-node", "2", "--framework", "megatron", "pretrain.py", "--framework", "theirs"],
            ["--nproc-per-node", "2", *START, "pretrain.py", "--framework", "theirs"],
        ),
        (["-m", "--framework", "megatron", "pkg.train", "-m"], [*START, "-m", "pkg.train", "-m"]),
        (["--framework", "megatron", "--module", "pkg.train"], [*START, "-m", "pkg.train"]),
    ],
)
def test_the_starter_comes_before_the_script(given: list[str], wanted: list[str]) -> None:
    split = split_framework(given, run.get_args_parser())
    assert (split.framework, split.arguments) == ("megatron", wanted)


def test_without_a_framework_nothing_changes() -> None:
    given = ["--nproc-per-node", "2", "train.py", "--framework", "theirs"]
    assert split_framework(given, run.get_args_parser()).arguments == given


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (["--framework", "keras", "train.py"], "--framework"),
        (["--framework", "megatron", "--no-python", "./train"], "--no-python"),
    ],
)
def test_what_cannot_be_started_is_refused(given: list[str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        split_framework(given, run.get_args_parser())
    assert caught.value.field == field


_PARENT = """
import multiprocessing, os, sys, time
if __name__ == "__main__":
    manager = multiprocessing.get_context("spawn").Manager()
    if not (child := os.fork()):
        time.sleep(600)
    print(manager._process.pid, child, flush=True)
    time.sleep(600)
"""
_DAEMON = """
import os, time
if not (child := os.fork()):
    os.setsid()
    os.fork()
    time.sleep(600)
print(child, flush=True)
time.sleep(600)
"""


def test_helpers_of_a_killed_parent_are_ended_and_nothing_else(tmp_path: Path) -> None:
    script, mark = tmp_path / "parent.py", orphans.new_mark()
    script.write_text(_PARENT)
    environ = os.environ | {orphans.MARK: mark}
    other = subprocess.Popen(["sleep", "600"], env=environ)
    parent = subprocess.Popen([sys.executable, str(script)], env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        children = [int(pid) for pid in parent.stdout.readline().split()]
        parent.send_signal(signal.SIGKILL)
        parent.wait(60)
        assert sorted(orphans.reap(mark, [str(script)])) == sorted(children)
        assert other.poll() is None
        assert orphans.reap(mark, [str(script)]) == [], "it has waited for their end"
    finally:
        for process in (parent, other):
            process.kill()
            process.communicate()


def test_a_child_with_a_session_of_its_own_is_left_alone_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its command line is that of its parent; a user has meant it to outlive that. So has its own child."""
    script, mark = tmp_path / "parent.py", orphans.new_mark()
    script.write_text(_DAEMON)
    parent = subprocess.Popen(
        [sys.executable, str(script)], env=os.environ | {orphans.MARK: mark}, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        until(lambda: os.getsid(child) == child and len(orphans._of_attempt(mark)) == 3, "it has a child of its own")
        parent.kill()
        parent.wait(60)
        assert orphans.reap(mark, [str(script)]) == []
        orphans.tell_of_others(mark)
        assert f"{child} (" in caplog.text
    finally:
        os.killpg(child, signal.SIGKILL)
        parent.communicate()


def test_helpers_of_one_killed_rank_are_ended_and_none_of_another(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    command = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) for _ in range(2)
    ]
    try:
        children = []
        for rank in ranks:
            assert rank.stdout is not None
            children.append([int(pid) for pid in rank.stdout.readline().split()])
        assert orphans.reap_session(os.getpid(), ["nobody"]) == []
        ranks[0].kill()
        ranks[0].wait(60)
        assert sorted(orphans.reap_session(ranks[0].pid, [str(script)])) == sorted(children[0])
        assert all(Path(f"/proc/{pid}").exists() for pid in children[1])
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.communicate()


def test_other_processes_of_a_killed_parent_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """A server that it has started goes on, and holds the port that the new rank's needs.

    Our controller of MindIO's lingers for a few seconds by itself, and holds nothing that a new rank needs.
    """
    mark = orphans.new_mark()
    controller = ["sh", "-c", "sleep 600; : from lastgasp.backends.ascend.mindio.controller import main"]
    code = (f"import subprocess as s; print(s.Popen(['sleep', '601'], stdout=s.DEVNULL).pid, "
            f"s.Popen({controller}, stdout=s.DEVNULL, start_new_session=True).pid, flush=True)")  # fmt: skip
    environ = os.environ | {orphans.MARK: mark}
    started = subprocess.run([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True, check=True)
    server, lingers = map(int, started.stdout.split())
    os.kill(lingers, 0)
    try:
        assert orphans.reap(mark) == []
        orphans.tell_of_others(mark)
        assert f"{server} (sleep 601)" in caplog.text and "may hold ports" in caplog.text
        assert "mindio" not in caplog.text
        caplog.clear()
        orphans.tell_of_others(orphans.new_mark())
        assert caplog.text == ""
    finally:
        os.kill(server, signal.SIGKILL)
        os.killpg(lingers, signal.SIGKILL)


def test_another_round_is_left_alone() -> None:
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=time.sleep, args=(600,))
    child.start()
    try:
        assert orphans.reap(orphans.new_mark()) == []
        assert child.is_alive()
    finally:
        child.kill()
        child.join(60)
        child.close()

