"""The auxiliary states of all ranks, as far as the controller has them; from the buffers of those that are dead."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from lastgasp.trailer import split_trailer

from .actions import Remark
from .members import Member

LOST_STATE = (
    "the random state of rank {rank} at step {step} died with its process or host: unless that rank was only cut off "
    "and adds it, it draws anew from there on"
)


class RankBuffers(Protocol):
    """What the ranks have recorded outside of their processes. Nothing here waits or raises."""

    @property
    def awaited(self) -> bool:
        """Whether another host may still report the buffer of a dead rank; for two seconds at most."""

    def exists(self, rank: int) -> bool:
        """Whether this rank has a buffer."""

    def newest(self, rank: int) -> int:
        """The newest step that this rank has completed, by its buffer on this host; -1 if that is not known."""

    def state(self, rank: int, step: int) -> bytes | None:
        """The auxiliary state of this rank at the end of `step`."""


class NoBuffers:
    """Those of ranks that have none."""

    awaited = False

    def exists(self, rank: int) -> bool:
        """As in the protocol."""
        return False

    def newest(self, rank: int) -> int:
        """As in the protocol."""
        return -1

    def state(self, rank: int, step: int) -> bytes | None:
        """As in the protocol."""
        return None


def auxiliary_states(
    step: int, members: Mapping[int, Member], buffers: RankBuffers, written: Collection[int] = ()
) -> tuple[dict[int, bytes], list[Remark]]:
    """The states of all ranks at `step`, dead ones included: from their buffers, or as they sent them.

    Args:
        written: ranks whose arena is saved, which has their state.

    Returns:
        Them by rank, and remarks on those that were lost.
    """
    found: dict[int, bytes] = {}
    lost = []
    for rank, member in members.items():
        state, prepared = buffers.state(rank, step), member.prepared
        if state is None and prepared is not None and prepared.step == step:
            state = split_trailer(prepared.aux)[0] or None
        if state is not None:
            found[rank] = state
        elif member.gone and rank not in written and buffers.exists(rank) and not member.seeded:
            lost.append(Remark(text=LOST_STATE.format(rank=rank, step=step)))
    return found, lost


def carried_values(step: int, members: Mapping[int, Member]) -> dict[int, bytes]:
    """What ranks have sent besides (`ports.CarriesValues`), by rank."""
    answers = {rank: member.prepared for rank, member in members.items()}
    return {
        rank: split_trailer(one.aux)[1] for rank, one in answers.items() if one is not None and one.step == step
    }
