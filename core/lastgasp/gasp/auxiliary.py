"""The auxiliary states of all ranks, as far as the controller can get at them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lastgasp.crash_safe_buffer import CrashSafeBuffer

from .keepers import LOST_STATE, Keepers
from .members import Member
from .peers import Peer


def auxiliary_states(
    step: int,
    members: Mapping[int, Member],
    peers: Mapping[int, Peer],
    keepers: Keepers,
    note: Callable[[str], None],
) -> dict[int, bytes]:
    """Those of `step`, also of dead ranks: from their crash-safe buffers, or as they sent them.

    Args:
        note: is told of states that were lost.
    """
    found: dict[int, bytes] = {}
    for rank, member in members.items():
        peer, prepared = peers.get(rank), member.prepared
        aux = CrashSafeBuffer.read(peer.buffer_fd, step) if peer is not None and peer.buffer_fd >= 0 else None
        if aux is None and prepared is not None and prepared.step == step:
            aux = prepared.aux or None
        if aux is None:
            aux = keepers.aux(rank, step)
        if aux is not None:
            found[rank] = aux
        elif member.gone and (keepers.has_buffer(rank) or (peer is not None and peer.buffer_fd >= 0)):
            note(LOST_STATE.format(rank=rank, step=step))
    return found
