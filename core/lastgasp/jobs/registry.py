"""Registration of workers with the job's control plane: the port, and the embedded engine's implementation."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from typing import Protocol

from lastgasp import __version__, _clock
from lastgasp.gasp import messages as m
from lastgasp.gasp.cards import WorkerCard
from lastgasp.gasp.processor import Processor

__all__ = ["EmbeddedRegistry", "WorkerCard", "WorkerRegistry", "card_of_this_process"]


class WorkerRegistry(Protocol):
    """Where a worker registers. Served by the embedded engine, or by TaskD.

    Called by the Session on every rank, on the training thread: `register` once, after the process group is up and
    before the first step; `deregister` at most once, at the normal end of training. A rank that dies, or exits
    after a fault, never deregisters; the control plane notices that itself. Neither raises, and neither waits
    for another rank.
    """

    def register(self, card: WorkerCard) -> None:
        """Show this worker in the control plane; no effect if that cannot be reached."""

    def deregister(self) -> None:
        """From now on this worker's end is not a fault; the control plane releases it when the process ends, at the
        latest."""


class EmbeddedRegistry:
    """Registers over the rank's control connection: `lastgasp ps` shows the card."""

    def __init__(self, processor: Processor) -> None:
        self._processor = processor

    def register(self, card: WorkerCard) -> None:
        """As in the port."""
        self._processor.register(card)

    def deregister(self) -> None:
        """As in the port. Waits for a recovery that may need this rank, within the save's limits."""
        self._processor.goodbye()


def card_of_this_process(rank: int, device: str = "", versions: Mapping[str, str] | None = None) -> WorkerCard:
    """The card of this process.

    Args:
        rank: its global rank.
        device: as the framework writes it.
        versions: of the framework and its parts, by name; lastgasp and python are added.
    """
    own = {"lastgasp": __version__, "python": platform.python_version()}
    return WorkerCard(
        rank=rank,
        node=m.encodable(socket.gethostname()),
        pid=os.getpid(),
        device=m.encodable(device),
        versions=own | {m.encodable(name): m.encodable(text) for name, text in (versions or {}).items()},
        started_ns=_clock.wall_ns(),
    )
