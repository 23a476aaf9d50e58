"""A rank without any framework: obeys lines on stdin, reports on stdout. For engine tests and benchmarks.

step N   complete step N;   update   enter the update and stay there;   raise   report an exception
stuck    block the main thread in a C call for ever;   done   leave normally;   vanish   sys.exit(3), told to nobody
peer     a collective failed because another rank is gone;   note TEXT   for the incident's record
half N   complete step N, but stop in the middle of its copy into the arena (option `arenas`)
loop F   take marked steps until the file F is there (option `profiling`: where the rows go)
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from lastgasp import __version__
from lastgasp.arena import Arena
from lastgasp.arena_taking import taken_over
from lastgasp.backends.ascend.mindio import finding
from lastgasp.config import GaspConfig
from lastgasp.crash_safe_buffer import CrashSafeBuffer
from lastgasp.errors import LastgaspError
from lastgasp.gasp import answering, link
from lastgasp.gasp.messages import Release
from lastgasp.gasp.rank_status import Released, exit_code
from lastgasp.ports import SaveResult, Wanted
from lastgasp.session import Contact, Session
from lastgasp.steps import bits
from lastgasp.steps.attach import Marking
from lastgasp.steps.settings import MarksConfig
from lastgasp.topology import Place, ReplicaGroups, data_parallel

COLLECTIVE = '{"streamId": "0","count": "8","dataType": "fp32","groupName": "g","opName": "HcclAllReduce"}'
"""The name of a marked collective."""


def say(event: str, **more: object) -> None:
    """One JSON line with the time in ns."""
    sys.stdout.write(json.dumps({"event": event, "ns": time.time_ns(), **more}) + "\n")
    sys.stdout.flush()


@dataclass
class Result:
    """What the toy save wrote."""

    path: str
    temp: Path
    nbytes: int
    first_byte_ns: int
    part: bytes = b""


PATIENCE = 150.0
"""Seconds at most that a save waits for the file `save_until`."""


class ToySource:
    """Its entire state is a number."""

    def __init__(self, rank: int, directory: Path, options: dict[str, Any]) -> None:
        self.rank, self.directory = rank, directory
        self.save_seconds, self.fail = options.get("save_seconds", 0.0), rank in options.get("failing", [])
        self.until = Path(options["save_until"]) if "save_until" in options else None
        self._saves = 0
        self._buffer = CrashSafeBuffer(64)
        self.buffer_fd = self._buffer.fd

    def note(self, step: int) -> None:
        """Put the auxiliary state of `step` into the box."""
        text = f"rank {self.rank} step {step}".encode()
        self._buffer.begin(step, settled=True)[: len(text)] = text
        self._buffer.end(len(text))

    def capture(self, step: int) -> bytes:
        """As the port says."""
        return CrashSafeBuffer.read(self.buffer_fd, step) or b""

    def save(self, step: int, aux: Mapping[int, bytes], reason: str) -> Result:
        """As the port says; slow or failing where the test wants it."""
        say("save", step=step, aux={r: s.decode() for r, s in aux.items()}, reason=reason)
        if self.fail:
            raise OSError(28, "No space left on device")
        time.sleep(self.save_seconds)
        deadline = time.monotonic() + PATIENCE
        while self.until is not None and not self.until.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._saves += 1  # two plans may write at once, and the void one removes its own
        temp = self.directory / f".step-{step}.{self.rank}.{self._saves}.tmp"
        temp.write_text(str(step))
        return Result(str(self.directory / f"step-{step}.toy"), temp, temp.stat().st_size, time.time_ns())

    def publish(self, result: SaveResult, parts: Mapping[int, bytes]) -> None:
        """As the port says."""
        assert isinstance(result, Result)
        result.temp.rename(result.path)
        say("published", path=result.path, parts=sorted(parts))

    def discard(self, result: SaveResult) -> None:
        """As the port says."""
        assert isinstance(result, Result)
        result.temp.unlink(missing_ok=True)


class ShardedToy(ToySource):
    """Its number is held by no other rank; an arena has a copy, which names rank and step."""

    def __init__(self, rank: int, directory: Path, options: dict[str, Any]) -> None:
        super().__init__(rank, directory, options)
        self.arena = Arena()
        self.arena.reserve(1 << 20)

    def note(self, step: int) -> None:
        """Put the state into the arena, too, before the step counts as captured."""
        self.arena.copy(step, [f"shard of rank {self.rank} at step {step}".encode().ljust(1 << 19)])
        super().note(step)

    def half(self, step: int) -> None:
        """Stop in the middle of that."""

        def pieces() -> Iterator[bytes]:
            yield bytes(1 << 18)
            say("copying")
            threading.Event().wait()

        self.arena.copy(step, pieces())

    def save_shards(self, step: int, aux: Mapping[int, bytes], reason: str, wanted: Wanted) -> Result:
        """One line for each shard; from the arena as it lies there."""
        found = {self.rank: f"live shard of rank {self.rank} at step {step}"} if wanted.own else {}
        found |= {rank: bytes(data).decode().strip() for rank, data in wanted.arenas.items()}
        say("shards", own=wanted.own, arenas=sorted(wanted.arenas), common=wanted.common)
        result = self.save(step, aux, reason)
        result.part = json.dumps(found).encode()
        return result

    def publish(self, result: SaveResult, parts: Mapping[int, bytes]) -> None:
        """All shards in one file."""
        assert isinstance(result, Result)
        shards: dict[str, str] = {}
        for part in parts.values():
            shards |= json.loads(part)
        result.temp.write_text(json.dumps(shards, sort_keys=True))
        super().publish(result, parts)
        for temp in self.directory.glob(".step-*.tmp"):
            temp.unlink()


def main() -> None:
    """Run one rank; its options are a JSON object in argv[1]."""
    options = json.loads(sys.argv[1])
    rank, world, directory = options["rank"], options["world"], Path(options["directory"])
    groups = options.get("replicas")
    replicas = cast(ReplicaGroups, tuple(map(tuple, groups))) if groups else data_parallel(world)
    limits = {
        "hang_timeout": options.get("hang"),
        "finish_timeout": options.get("finish"),
        "save_timeout": options.get("save"),
    }
    config = GaspConfig.resolve(directory, **limits)
    vars(answering)["REACH"] = options.get("reach", answering.REACH)
    if "taskd_join" in options:
        assert "JOIN" in vars(finding)
        vars(finding)["JOIN"] = options["taskd_join"]
    vars(link)["__version__"] = options.get("version", __version__)
    source = (ShardedToy if "arenas" in options else ToySource)(rank, directory, options)
    place = Place(rank=rank, world_size=world, replicas=replicas, attempt=options.get("attempt", 0))
    try:
        session = Session(config, place, source, Contact.from_environment(), marking(options))
    except LastgaspError as error:
        say("refused", why=str(error))
        sys.exit(2)
    session._patience = options.get("leave", session._patience)
    session.take_sigterm()
    if "holds" in options:  # what each rank says that it holds
        say("compared", alike=session.compare_replicas(lambda: {"model": options["holds"][rank].encode()}))
    begin(session, source)
    say("ready", pid=os.getpid())
    try:
        for line in sys.stdin:
            obey(line.split(), session, source)
    except Released as released:
        leave(released.outcome)
    except RuntimeError as error:  # FORCE STOP: out of the loop, as an adapter sees it
        leave(session.fault("exception", f"RuntimeError: {error}"))


def begin(session: Session, source: ToySource) -> None:
    """With what was left in arenas, if anything was."""
    step = durable = 0
    with taken_over(session, getattr(source, "arena", None), _not_of_toys) as taken:
        if taken is not None:
            step, durable = taken.step, taken.durable
            say("left", step=step, durable=durable, text=bytes(taken.payload).decode().strip())
    session.training_started(step, durable)


def _not_of_toys(payload: memoryview) -> str:
    return "" if bytes(payload[:5]) == b"shard" else "it is no shard of a toy"


def marking(options: dict[str, Any]) -> Marking | None:
    """Everything but the collectives, where the test says where the rows go."""
    return Marking(config=MarksConfig(directory=Path(options["profiling"]))) if "profiling" in options else None


def loop(end: Path, session: Session, source: ToySource) -> None:
    """Steps with one range of each kind, hundreds a second, until `end` is there."""
    assert session.recorder is not None
    marks, step = session.recorder.marks, session.status.step
    collective = marks.define(COLLECTIVE, domain="communication", bit=bits.COMM, stream=True)
    kinds = [marks.mark("dataloader"), marks.mark("forward"), collective, marks.mark("save_checkpoint")]
    while not end.exists():
        step += 1
        marks.step_begin(step)
        for kind in kinds:
            with kind:
                time.sleep(0.0002)
        session.before_update()
        source.note(step)
        session.step_completed(step)
        marks.step_end()
    say("looped", step=step, written=session.recorder.close(), wall_offset=marks.wall_offset, dropped=marks.dropped)


def obey(words: list[str], session: Session, source: ToySource) -> None:
    """Carry out one line."""
    if words[0] == "step":
        session.before_update()
        source.note(int(words[1]))
        session.step_completed(int(words[1]))
        say("stepped", step=int(words[1]))
    elif words[0] == "half":
        assert isinstance(source, ShardedToy)
        session.before_update()
        source.half(int(words[1]))
    elif words[0] == "spoil":  # a bit of this rank's newest copy
        assert isinstance(source, ShardedToy)
        at = 3 * 4096 if session.status.step % 2 else 3 * 4096 + (1 << 20) + 4096
        os.pwrite(source.arena.fd, b"?", at)
        say("spoiled")
    elif words[0] == "loop":
        loop(Path(words[1]), session, source)
    elif words[0] == "update":
        session.before_update()
        say("updating")
    elif words[0] == "finish":
        source.note(int(words[1]))
        session.step_completed(int(words[1]))
    elif words[0] == "moved":
        session.progress("backward")
    elif words[0] == "gather":
        say("gathered", parts=[p.decode() for p in session.gather(words[1], words[2].encode())])
    elif words[0] == "raise":
        say("raising")
        leave(session.fault("exception", "ValueError: boom"))
    elif words[0] == "peer":
        say("raising")
        leave(session.fault("peer", "RuntimeError: connection closed by peer"))
    elif words[0] == "note":
        session.note(" ".join(words[1:]))
        say("noted")
    elif words[0] == "vanish":
        sys.exit(3)
    elif words[0] == "stuck":
        session.progress("backward")
        say("stuck")
        threading.Event().wait()
    elif words[0] == "done":
        session.close()
        say("done")
        done(words[1:])


def done(how: list[str]) -> None:
    """Leave as a script does: `now` without any clean-up, `4` after four seconds of work of its own."""
    if how == ["now"]:
        os._exit(0)
    time.sleep(float(how[0]) if how else 0.0)
    sys.exit(0)


def leave(outcome: Release) -> None:
    """Say how it ended and go."""
    say("released", ending=outcome.ending, step=outcome.step, path=outcome.path, reason=outcome.reason)
    os._exit(exit_code(outcome))


if __name__ == "__main__":
    main()
