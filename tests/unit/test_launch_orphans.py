"""A launcher that is the first process of a container gets what dead ranks have left, and removes what has ended."""

from __future__ import annotations

import subprocess
import sys

from support.hosts import needs_hosts

FIRST = """
import os, subprocess, sys, time
from lastgasp.launch import orphans

assert os.getpid() == 1
leaves = "import os, subprocess; print(subprocess.Popen(['sleep', '0.2']).pid, flush=True); os._exit(0)"
rank = subprocess.Popen([sys.executable, "-c", leaves], stdout=subprocess.PIPE, start_new_session=True)
left = int(rank.stdout.read())
helper = "import os, sys; from multiprocessing.spawn import _main; print(os.getpid(), flush=True); sys.stdin.read()"
leaves = f"import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', {helper!r}]); os._exit(0)"
other = subprocess.Popen([sys.executable, "-c", leaves], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                         start_new_session=True, env=os.environ | {orphans.MARK: "of that attempt"})
helps = int(other.stdout.readline())
own = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
threads = "import ctypes, os, threading; libc = ctypes.CDLL(None); print(os.getpid(), flush=True); "
threads += "threading.Thread(target=libc.usleep, args=[700000]).start(); "
threads += "libc.syscall(60 if os.uname().machine == 'x86_64' else 93, 0)"  # exit, of this thread
leaves = f"import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', {threads!r}]); os._exit(0)"
third = subprocess.Popen([sys.executable, "-c", leaves], stdout=subprocess.PIPE, start_new_session=True)
half = int(third.stdout.readline())
state = lambda pid: open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
while {state(pid) for pid in (left, own.pid, rank.pid, third.pid, half)} != {"Z"}:
    time.sleep(0.01)
assert orphans.reap("of that attempt") == [helps]
assert not any(os.path.exists(f"/proc/{pid}") for pid in (left, helps, half))
assert (own.wait(), rank.wait()) == (7, 0)
"""


@needs_hosts
def test_the_first_process_removes_orphans_and_leaves_the_exit_codes_of_its_children() -> None:
    command = ["unshare", "--pid", "--mount-proc", "--fork", "--kill-child", sys.executable, "-c", FIRST]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
