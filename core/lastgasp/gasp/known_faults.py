"""The faults of one recovery, each known once."""

from __future__ import annotations

from lastgasp.events import Fault

from .views import later


class KnownFaults(list[Fault]):
    """In the order in which they were reported. Only `remember` adds to it, in constant time.

    Attributes:
        only_stops: whether all are SIGTERMs, so that every process can still go on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.only_stops = True
        self._known: set[tuple[int, str]] = set()

    def remember(self, fault: Fault) -> bool:
        """Return False if a fault of that rank and kind is known."""
        if (fault.rank, fault.kind) in self._known:
            return False
        self._known.add((fault.rank, fault.kind))
        self.only_stops = self.only_stops and fault.kind == "sigterm"
        self.append(fault)
        return True

    def forget(self, fault: Fault) -> None:
        """It has turned out to be none."""
        self._known.discard((fault.rank, fault.kind))
        self[:] = [one for one in self if (one.rank, one.kind) != (fault.rank, fault.kind)]
        self.only_stops = all(one.kind == "sigterm" for one in self)

    def completed(self, rank: int, step: int) -> None:
        """The rank had completed a later step than its faults say."""
        self[:] = [later(fault, step) if fault.rank == rank else fault for fault in self]
