"""The test bed of hosts: what one host does to the others, and what is left of it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.hosts import Host, needs_hosts, network
from support.waiting import until

pytestmark = needs_hosts
PATIENCE = 150.0
"""Seconds that a process may take."""

_SAY = "import socket,sys; s=socket.create_connection((sys.argv[1], 4000), {}); s.sendall(b'hello'); s.close()"
_HEAR = """
import socket, sys
s = socket.create_server(("0.0.0.0", 4000)); print("listens", flush=True)
while True:
    c, _ = s.accept()
    while data := c.recv(4096): print(data.decode(), flush=True)
    print("closed", flush=True)
"""
_HOLD = "import socket,sys,time; s=socket.create_connection((sys.argv[1], 4000)); s.sendall(b'held'); time.sleep(99)"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[dict[str, Host]]:
    with network(tmp_path, "zoe", "adam", own=[tmp_path / "disk"]) as hosts:
        yield hosts


def python(code: str, *more: str) -> list[str]:
    return [sys.executable, "-S", "-c", code, *more]


def test_a_host_has_its_own_name_disk_memory_processes_and_knows_the_others_by_name(
    pair: dict[str, Host], tmp_path: Path
) -> None:
    shell = "hostname; cat /proc/self/stat | cut -d' ' -f1; echo $PPID; touch /dev/shm/x; echo $0 > $1/disk/name"
    job = pair["zoe"].start(["sh", "-c", shell, "zoe", str(tmp_path)])
    assert job.code(PATIENCE) == 0
    assert job.output.split()[0] == "zoe" and int(job.output.split()[1]) < 100
    assert not Path("/dev/shm/x").exists() and pair["zoe"].sees(Path("/dev/shm/x")).exists()
    assert not pair["adam"].sees(Path("/dev/shm/x")).exists()
    assert (pair["zoe"].own(tmp_path / "disk") / "name").read_text() == "zoe\n"
    assert os.listdir(pair["adam"].own(tmp_path / "disk")) == []
    found = pair["adam"].start(python("import socket; print(socket.gethostbyname('zoe'))"))
    assert found.code(PATIENCE) == 0 and found.output.strip() == pair["zoe"].address


def test_packets_get_through_are_dropped_and_get_through_again(pair: dict[str, Host]) -> None:
    hears = pair["adam"].start(python(_HEAR))
    until(lambda: "listens" in hears.output, "adam listens")
    assert pair["zoe"].start(python(_SAY.format(100), "adam")).code(PATIENCE) == 0
    until(lambda: "hello\nclosed" in hears.output, "the first word has come")
    pair["adam"].cut()
    assert pair["zoe"].start(python(_SAY.format(3), "adam")).code(PATIENCE) == 1
    assert pair["adam"].wire.lost > 0
    pair["adam"].mend()
    assert pair["zoe"].start(python(_SAY.format(100), "adam")).code(PATIENCE) == 0
    until(lambda: hears.output.count("hello") == 2, "the second word has come")


def test_a_host_without_power_says_nothing_and_one_that_loses_a_process_closes_its_sockets(
    pair: dict[str, Host],
) -> None:
    hears = pair["adam"].start(python(_HEAR))
    until(lambda: "listens" in hears.output, "adam listens")
    speaker = pair["zoe"].start(python(_HOLD, "adam"))
    until(lambda: hears.output.count("held") == 1, "zoe's word has come")
    speaker.kill()
    until(lambda: hears.output.count("closed") == 1, "the kernel has closed the socket of the killed process")
    assert speaker.code(PATIENCE) == -signal.SIGKILL
    pair["zoe"].start(python(_HOLD, "adam"))
    until(lambda: hears.output.count("held") == 2, "zoe's word has come")
    pair["zoe"].power_off()
    time.sleep(0.5)  # for a FIN that must not come
    assert hears.output.count("closed") == 1
    pair["zoe"].power_on()
    assert pair["zoe"].start(python(_SAY.format(100), "adam")).code(PATIENCE) == 0


def test_a_slow_wire_takes_its_time_and_loses_packets(pair: dict[str, Host]) -> None:
    hears = pair["adam"].start(python(_HEAR))
    until(lambda: "listens" in hears.output, "adam listens")
    pair["adam"].slow(delay=0.2, loss=0.2)
    code = "import socket,sys,time; t=time.monotonic(); socket.create_connection(('adam', 4000)); "
    job = pair["zoe"].start(python(code + "print(time.monotonic()-t)"))
    assert job.code(PATIENCE) == 0
    assert float(job.output) >= 0.4
    many = "import socket; s=socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
    pair["adam"].wire.lost = 0
    assert pair["zoe"].start(python(many + "[s.sendto(b'x', ('adam', 9)) for _ in range(200)]")).code(PATIENCE) == 0
    until(lambda: pair["adam"].wire.lost > 10, "about 40 of 200 are lost")


def test_orphans_are_reaped_and_the_host_lives_on(pair: dict[str, Host]) -> None:
    job = pair["zoe"].start(["sh", "-c", "sleep 0.3 & exec sleep 100"])
    until(lambda: len(pair["zoe"].processes()) == 2, "both run")
    job.kill()
    assert job.code(PATIENCE) == -signal.SIGKILL
    until(lambda: not pair["zoe"].processes(), "the orphan has ended")
    assert pair["zoe"].start(["true"]).code(PATIENCE) == 0


def test_a_clock_that_is_ahead(pair: dict[str, Host]) -> None:
    begun, pair["zoe"].clock = time.time(), 7200.0
    job = pair["zoe"].start([sys.executable, "-c", "import time; print(time.time(), time.time_ns())"])
    assert job.code(PATIENCE) == 0
    seconds, nanoseconds = map(float, job.output.split())
    assert begun + 7199 < seconds <= nanoseconds / 1e9 < time.time() + 7201


def test_nothing_is_left_when_the_test_fails_in_between(tmp_path: Path) -> None:
    """The leak police looks for processes, threads and sockets after this."""
    with pytest.raises(ZeroDivisionError):
        _fail_with_processes(tmp_path)


def _fail_with_processes(folder: Path) -> None:
    with network(folder, "one") as hosts:
        hosts["one"].start(["sh", "-c", "setsid sleep 1000 & sleep 1000"])
        until(lambda: len(hosts["one"].processes()) == 3, "all run")
        raise ZeroDivisionError
