"""A toy rank that can go on in the same process (ports.InPlace): rank 0 has one on-chip memory error."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lastgasp.config import GaspConfig
from lastgasp.session import Contact, Session
from lastgasp.topology import Place, data_parallel
from support.engine_worker import ToySource
from support.waiting import until

STEPS, BROKEN_AT = 200, 5
"""The other rank must still train when the error is noticed, however slow the machine is: until then each of its steps
takes longer than the one before."""


class Repairable(ToySource):
    """Its state is a number, which a repair brings over by a file."""

    from_files = False

    def __init__(self, rank: int, directory: Path) -> None:
        super().__init__(rank, directory, {})
        self.value = self.step = self.entered = 0
        self.broken = False

    def stop(self) -> None:
        """As the port says."""

    def clean(self, memory_error: bool) -> int:
        """As the port says."""
        assert memory_error == self.broken
        return 0

    def rebuild(self, ranks: list[int]) -> None:
        """As the port says."""

    def repair(self, step: int, pairs: Mapping[str, Any], rebuild: bool) -> None:
        """Send, or take."""
        file = self.directory / "repair"
        if self.rank in pairs["src"]:
            file.with_suffix(".new").write_text(str(self.value))
            file.with_suffix(".new").rename(file)
            return
        self._wait_for(file.name)
        self.value, self.broken = int(file.read_text()), False

    def _wait_for(self, name: str) -> None:
        until((self.directory / name).exists, name)

    def rollback(self, step: int) -> None:
        """As the port says."""
        assert self.value == step and not self.broken
        self.step = step

    def synchronize(self) -> None:
        """As the port says."""

    def train(self, session: Session) -> None:
        """From the current state."""
        self.entered += 1
        while self.step < STEPS:
            time.sleep(0.01 * self.step if self.entered == 1 else 0.001)
            if self.rank == 0 and self.step == BROKEN_AT and self.entered == 1:
                self._wait_for("rank 1 trains")
                self.value, self.broken = -1, True
                raise RuntimeError("UCE ERROR: on-chip memory")
            session.before_update()
            self.value += 1
            self.note(self.step + 1)
            self.step += 1
            session.step_completed(self.step)
            (self.directory / f"rank {self.rank} trains").touch()


def main() -> None:
    """Run one of two ranks: argv is rank, directory."""
    rank, directory = int(sys.argv[1]), Path(sys.argv[2])
    source = Repairable(rank, directory)
    place = Place(rank=rank, world_size=2, replicas=data_parallel(2))
    session = Session(GaspConfig.resolve(directory), place, source, Contact.from_environment())
    session.training_started(0, 0)
    session.protect(source.train)(session)
    session.gather("done", b"")
    session.close()
    print(json.dumps({"value": source.value, "step": source.step, "entered": source.entered}))


if __name__ == "__main__":
    main()
