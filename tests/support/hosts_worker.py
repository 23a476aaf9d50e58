"""A rank for tests with hosts: trains by a collective over plain sockets, without any framework.

Usage: hosts_worker.py DIRECTORY STEPS PACE. The state is one number; each step adds a number of every rank's own
generator to it, so that a step too many or too few, or a rank whose generator was not restored, shows in the end.
As with gloo a collective waits for ever for a host that says nothing, and raises when a peer's socket closes.
Writes `at-RANK-ATTEMPT` (the step it has completed) and `end-RANK` (the state at the end) into DIRECTORY.

HOSTS_GATE=STEP: no rank goes on behind that step before the file DIRECTORY/go is there.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lastgasp.config import GaspConfig
from lastgasp.connect import contact_of
from lastgasp.crash_safe_buffer import CrashSafeBuffer
from lastgasp.gasp.leaving import leave_now
from lastgasp.gasp.rank_status import Released, exit_code
from lastgasp.ports import SaveResult
from lastgasp.session import Session
from lastgasp.topology import Place, data_parallel

PORT = 5000
"""Of the collectives, plus the attempt."""
_WORD = struct.Struct("<Q")
_MASK = (1 << 64) - 1


@dataclass
class Saved:
    """What a save wrote; `path` is where it will be."""

    path: str
    temp: Path
    nbytes: int
    first_byte_ns: int
    part: bytes = b""


class Numbers:
    """The state, and where it is saved: `step-N.toy`; a second one with another state of that step is a `.conflict`.

    As in the adapters the first commit of a step stands, and who comes second adds its generators.
    """

    def __init__(self, rank: int, directory: Path) -> None:
        self.rank, self.directory = rank, directory
        self.state, self.generator, self.step = 0, 1000 + rank, 0
        self._buffer = CrashSafeBuffer(64)
        self.buffer_fd = self._buffer.fd

    def newest(self) -> int:
        """Load the newest checkpoint; returns its step, 0 without one."""
        found = sorted(self.directory.glob("step-*.toy"), key=lambda path: int(path.stem.split("-")[1]))
        if found:
            content = json.loads(found[-1].read_text())
            self.state, self.step = content["state"], content["step"]
            for more in self.directory.glob(f"{found[-1].name}.more-*"):
                content["generators"] |= json.loads(more.read_text())["generators"]
            self.generator = content["generators"].get(str(self.rank), self.generator)
        return self.step

    def draw(self) -> int:
        """The next number of this rank's generator."""
        self.generator = (self.generator * 6364136223846793005 + 1442695040888963407) & _MASK
        return self.generator >> 11

    def note(self, step: int) -> None:
        """Put the auxiliary state of `step` into the box."""
        text = str(self.generator).encode()
        self._buffer.begin(step, settled=True)[: len(text)] = text
        self._buffer.end(len(text))

    def capture(self, step: int) -> bytes:
        """As the port says."""
        return CrashSafeBuffer.read(self.buffer_fd, step) or b""

    def save(self, step: int, aux: Mapping[int, bytes], reason: str) -> Saved:
        """As the port says."""
        content = {"step": step, "state": self.state, "generators": {r: int(s) for r, s in sorted(aux.items())}}
        temp = self.directory / f".step-{step}.{self.rank}.{os.getpid()}.tmp"
        begun = time.time_ns()
        temp.write_text(json.dumps(content))
        return Saved(str(self.directory / f"step-{step}.toy"), temp, temp.stat().st_size, begun)

    def publish(self, result: SaveResult, parts: Mapping[int, bytes]) -> str:
        """As the port says."""
        assert isinstance(result, Saved)
        note = ""
        try:
            os.link(result.temp, result.path)
        except FileExistsError:
            note = f"{Path(result.path).name} had been committed already"
            theirs, ours = json.loads(Path(result.path).read_text()), json.loads(result.temp.read_text())
            kind = "more-" if theirs["state"] == ours["state"] else "conflict-"
            os.link(result.temp, f"{result.path}.{kind}{self.rank}")
        result.temp.unlink()
        return note

    def contribute(self, step: int, path: str) -> str:
        """As `ports.Contributor` says."""
        if not (own := self.capture(step)):
            return ""
        temp = self.directory / f".more-{self.rank}.{os.getpid()}.tmp"
        temp.write_text(json.dumps({"generators": {str(self.rank): int(own)}}))
        temp.replace(f"{path}.more-{self.rank}")
        return f"the generator of rank {self.rank} was added to it"

    def discard(self, result: SaveResult) -> None:
        """As the port says."""
        assert isinstance(result, Saved)
        result.temp.unlink(missing_ok=True)


class Collective:
    """Sums over all ranks, through rank 0."""

    def __init__(self, rank: int, world: int, attempt: int) -> None:
        self._rank, self._peers = rank, {}
        address = (os.environ["MASTER_ADDR"], PORT + attempt)
        if rank == 0:
            with socket.create_server(("0.0.0.0", address[1]), reuse_port=True) as server:
                for _ in range(world - 1):
                    peer, _ = server.accept()
                    self._peers[_WORD.unpack(_exactly(peer))[0]] = peer
        else:
            self._peers = {0: _connected(address)}
            self._peers[0].sendall(_WORD.pack(rank))

    def sum(self, number: int) -> int:
        """The sum of every rank's number; raises OSError or EOFError when a peer is gone."""
        if self._rank:
            self._peers[0].sendall(_WORD.pack(number))
            return int(_WORD.unpack(_exactly(self._peers[0]))[0])
        whole: int = (number + sum(_WORD.unpack(_exactly(peer))[0] for peer in self._peers.values())) & _MASK
        for peer in self._peers.values():
            peer.sendall(_WORD.pack(whole))
        return whole


def _connected(address: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + 60
    while True:
        try:
            found = socket.create_connection(address, 10)
            found.settimeout(None)
            return found
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _exactly(peer: socket.socket) -> bytes:
    data = b""
    while len(data) < _WORD.size:
        more = peer.recv(_WORD.size - len(data))
        if not more:
            raise EOFError("Connection closed by peer")
        data += more
    return data


def main() -> None:
    """One rank under torchrun's environment."""
    directory, steps, pace = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = int(os.environ["LASTGASP_ATTEMPT"])
    directory.mkdir(exist_ok=True)
    numbers = Numbers(rank, directory)
    job = os.environ["LASTGASP_JOB"]
    place = Place(rank=rank, world_size=world, replicas=data_parallel(world), attempt=attempt, job=job)
    contact = contact_of(place, "this job spans hosts", lambda value: value)
    session = Session(GaspConfig.resolve(directory), place, numbers, contact)
    session.take_sigterm()
    session.gather("start", b"")
    collective = Collective(rank, world, attempt)
    begun = numbers.newest()
    numbers.note(begun)
    session.training_started(begun, begun)
    try:
        for step in range(begun + 1, steps + 1):
            train_step(session, numbers, collective, step)
            (directory / f"at-{rank}-{attempt}").write_text(str(step))
            time.sleep(pace)
            while str(step) == os.environ.get("HOSTS_GATE") and not (directory / "go").exists():
                time.sleep(0.01)
    except Released as released:
        leave_now(exit_code(released.outcome))
    except (OSError, EOFError) as error:
        leave_now(exit_code(session.fault("peer", f"{type(error).__name__}: {error}")))
    (directory / f"end-{rank}").write_text(f"{numbers.step} {numbers.state:x} {numbers.generator:x}")
    session.close()


def train_step(session: Session, numbers: Numbers, collective: Collective, step: int) -> None:
    """Forward and backward, then the update."""
    session.progress("backward")
    whole = collective.sum(numbers.draw())
    session.before_update()
    numbers.state = (numbers.state * 31 + whole) & _MASK
    numbers.step = step
    numbers.note(step)
    session.step_completed(step)


if __name__ == "__main__":
    main()
