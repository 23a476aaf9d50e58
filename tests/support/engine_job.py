"""A job of toy ranks (engine_worker.py) around a real controller, for engine tests and benchmarks."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from lastgasp.events import Incident, decode_incident
from lastgasp.gasp.attempt import Attempt
from lastgasp.gasp.serve import ControllerThread, Endpoint, new_token
from support.waiting import PATIENCE as DEADLINE
from support.waiting import until

WORKER = Path(__file__).with_name("engine_worker.py")


class ToyRank:
    """One process; lines in, events out, all with deadlines."""

    def __init__(self, options: dict[str, Any], environment: dict[str, str]) -> None:
        self.rank: int = options["rank"]
        self.events: list[dict[str, Any]] = []
        self._buffer = b""
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A launcher is there: released ranks whose main thread is stuck leave after 2 s, not 10.
            env=os.environ | {"LASTGASP_LAUNCHER": "test"} | environment,
        )

    def tell(self, line: str) -> None:
        """One order."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def wait_for(self, event: str, seconds: float = DEADLINE) -> dict[str, Any]:
        """The next event of that name; earlier others are kept in `events`."""
        deadline = time.monotonic() + seconds
        while True:
            for i, found in enumerate(self.events):
                if found["event"] == event:
                    return self.events.pop(i)
            if not self._read(deadline - time.monotonic()):
                raise AssertionError(f"rank {self.rank}: no {event!r} in {seconds:g} s, but {self.events}")

    def _read(self, seconds: float) -> bool:
        assert self.process.stdout is not None
        number = self.process.stdout.fileno()
        if seconds <= 0 or not select.select([number], [], [], seconds)[0]:
            return False
        data = os.read(number, 65536)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        self.events += [json.loads(line) for line in lines if line.startswith(b"{")]
        return bool(data)

    def code(self, seconds: float = DEADLINE) -> int:
        """The exit code."""
        return self.process.wait(seconds)

    def signal(self, number: signal.Signals) -> int:
        """Send it; returns the time in ns just before."""
        at = time.time_ns()
        os.kill(self.process.pid, number)
        return at

    def end(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class ToyJob:
    """N ranks and their controller. `options` go to every rank."""

    def __init__(self, directory: Path, world: int, endpoint: Endpoint | None = None, **options: Any) -> None:
        self.directory, self.world, self.options = directory, world, options
        self.thread = ControllerThread(new_token()) if endpoint is None else None
        self.endpoint = self.thread.endpoint if self.thread is not None else endpoint
        assert self.endpoint is not None
        self.ranks: list[ToyRank] = []

    def __enter__(self) -> ToyJob:
        self.ranks = [self.start(rank) for rank in range(self.world)]
        for rank in self.ranks:
            rank.wait_for("ready")
        if self.thread is not None:
            until(lambda: len(self.attempt.begun) == self.world, "the controller has heard that each rank has begun")
            # Limits under test are those that ranks keep; the controller's own wait for a rank that has no CPU.
            self.attempt.machine.finish_timeout = DEADLINE
        return self

    @property
    def attempt(self) -> Attempt:
        """What the controller, in this process, knows."""
        assert self.thread is not None
        found = self.thread._controller.attempt
        assert found is not None
        return found

    def hangs(self, rank: int) -> None:
        """The controller has seen that this rank is stopped; from now on a second without progress is too long."""
        assert self.thread is not None
        watch = self.thread._controller._watch
        assert watch is not None
        until(lambda: rank in watch.stopped(), f"rank {rank} is seen to be stopped")
        self.attempt.machine.progress.limit = 1.0

    def start(self, rank: int, **more: Any) -> ToyRank:
        """Start one more process."""
        assert self.endpoint is not None
        options = {"rank": rank, "world": self.world, "directory": str(self.directory), **self.options, **more}
        environment = {"LASTGASP_CONTROLLER": self.endpoint.address, "LASTGASP_TOKEN": self.endpoint.token}
        return ToyRank(options, environment)

    def step(self, step: int) -> None:
        """All ranks complete `step`."""
        for rank in self.ranks:
            rank.tell(f"step {step}")
        for rank in self.ranks:
            rank.wait_for("stepped")

    def stuck(self, *ranks: int) -> None:
        """These ranks' main threads block in C, as in a collective whose peer is gone."""
        for i in ranks:
            self.ranks[i].tell("stuck")
            self.ranks[i].wait_for("stuck")

    def incident(self) -> Incident:
        """The newest record, once everything known is in it."""
        if self.thread is not None:
            assert self.thread.settle()
        newest = max((self.directory / "incidents").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        return decode_incident(newest.read_bytes())

    def saved(self) -> list[str]:
        """Names of published checkpoints."""
        return sorted(path.name for path in self.directory.glob("step-*.toy"))

    def leftovers(self) -> list[str]:
        """Names of temporaries that were not removed."""
        return sorted(path.name for path in self.directory.glob(".*.tmp"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for rank in self.ranks:
            rank.end()
        if self.thread is not None:
            self.thread.stop()


@contextmanager
def held(controller: ControllerThread) -> Iterator[None]:
    """The controller's loop is behind: what happens meanwhile waits in sockets and queues."""
    entered, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        go_on.wait(DEADLINE)

    controller._loop.call_soon_threadsafe(wait)
    assert entered.wait(DEADLINE)
    try:
        yield
    finally:
        go_on.set()
