"""The police itself: each kind of leak fails the test that made it, and only that one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

CRIMES = """
import os, signal, socket, subprocess, sys, threading, time
from pathlib import Path

import support.police

loot = []

def test_innocent():
    thread = threading.Thread(target=time.sleep, args=(0.01,)); thread.start()
    subprocess.run([sys.executable, "-c", ""], check=True)
    socket.socket().close()

def test_thread():
    support.police.GRACE_SECONDS = 0.5  # from here on it is known who leaves something
    threading.Thread(target=time.sleep, args=(600,), daemon=True, name="loiterer").start()

def test_socket():
    loot.append(socket.socket())

def test_environ():
    os.environ["LASTGASP_LEAKED"] = "1"

def test_environ_was_put_back():
    assert "LASTGASP_LEAKED" not in os.environ

def test_handler():
    signal.signal(signal.SIGUSR1, lambda *a: None)

def test_handler_was_put_back():
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL

def test_wakeup():
    loot.extend(os.pipe()); os.set_blocking(loot[-1], False)
    signal.set_wakeup_fd(loot[-1])

def test_child():
    loot.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))

def test_defunct():
    loot.append(os.posix_spawn(sys.executable, [sys.executable, "-c", ""], os.environ))
    os.waitid(os.P_PID, loot[-1], os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has fetched its exit code

def test_orphan():
    nap = "import time; print(1, flush=True); time.sleep(601)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {nap!r}], stdout=subprocess.PIPE)"
    subprocess.run([sys.executable, "-c", code + ".stdout.readline()"], check=True)  # it runs, as /proc shows

def test_shared_memory():
    Path(os.environ["LASTGASP_RING_DIR"], "loot").touch()

def test_innocent_at_the_end():
    assert os.listdir(os.environ["LASTGASP_RING_DIR"]) == []
"""

NAMES = {
    "test_thread": "thread loiterer (daemon=True) still runs",
    "test_socket": "socket:*is still open",
    "test_environ": "environment variable LASTGASP_LEAKED was None and is '1'",
    "test_handler": "signal handler SIGUSR1 was *",
    "test_wakeup": "wakeup fd was -1 and is *",
    "test_child": "process * is left: *time.sleep(600)*",
    "test_defunct": "process * is left: (defunct)",
    "test_orphan": "process * is left: *time.sleep(601)*",
    "test_shared_memory": "*/loot is left",
}


def test_each_leak_fails_its_own_test_and_is_named(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An installed lastgasp is found anyway; one on a relative path is not, from another directory.
    places = [str(Path(__file__).parents[1]), *map(os.path.abspath, filter(None, sys.path))]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
    pytester.makepyfile(CRIMES)
    result = pytester.runpytest_subprocess("-p", "support.police", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=13, errors=len(NAMES))
    for test, leak in NAMES.items():
        result.stdout.fnmatch_lines([f"*::{test} leaked:", f"  {leak}"])
