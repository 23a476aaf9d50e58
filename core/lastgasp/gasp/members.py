"""What the controller's machine knows about each rank, and how its recovery ended."""

from __future__ import annotations

from dataclasses import dataclass

from lastgasp.events import Ending, Fault, Unused

from . import messages as m


@dataclass(slots=True)
class Member:
    """What is known about one rank that joined."""

    rank: int
    step: int = -1
    durable: int = 0
    begun: bool = False
    """Its training has begun; what it says of steps before that tells nothing."""
    gone: str = ""
    left: bool = False
    hung: bool = False
    fault: Fault | None = None
    prepared: m.Prepared | None = None
    failures: int = 0
    moves: int = 0
    """How often its state went on while it was being saved."""
    failed: str = ""
    """Why its last save failed."""

    def reached(self, step: int, durable: int) -> None:
        """As it says itself."""
        if self.begun or step > 0:
            self.step = max(self.step, step)
        self.durable = max(self.durable, durable)

    @property
    def here(self) -> bool:
        """It can be asked and can answer."""
        return not self.gone and not self.left and not self.hung


@dataclass
class Outcome:
    """How the recovery ended, for the incident record."""

    ending: Ending = "open"
    reason: str = ""
    step: int | None = None
    lost: int | None = None
    path: str = ""
    nbytes: int = 0
    first_byte_ns: int | None = None
    savers: tuple[int, ...] = ()
    unused: tuple[Unused, ...] = ()
