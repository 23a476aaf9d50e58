"""An all-gather over torch's own process group, for a job that has no controller."""

from __future__ import annotations

import torch.distributed as dist

from lastgasp.errors import ControlError


def all_gather(tag: str, payload: bytes) -> list[bytes]:
    """Every rank's `payload`, by rank. A collective: all ranks call it on their training threads, while all is well.

    Raises:
        ControlError: no process group, or a rank asks something else.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ControlError(f"the ranks cannot agree on {tag!r}: no controller, and no process group of torch's")
    found: list[tuple[str, bytes]] = [("", b"")] * dist.get_world_size()
    dist.all_gather_object(found, (tag, payload))
    if others := {other for other, _ in found} - {tag}:
        raise ControlError(f"the ranks could not agree on {tag!r}: others ask {sorted(others)}")
    return [part for _, part in found]
