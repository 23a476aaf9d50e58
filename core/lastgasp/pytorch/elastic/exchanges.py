"""What ranks exchange with each other: nothing can be within a micro-batch, where one rank does several of a step."""

from __future__ import annotations

import torch.distributed as dist

from lastgasp.pytorch.processgroups import members

EXCHANGES = "its micro-batches exchange something with other ranks, which would do more than one of them in a step"


def exchanged() -> int | None:
    """How often this rank has exchanged something with others so far; None where its process groups do not count it.

    They see it by whatever name it was called: functional collectives, C++, what was imported by name.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 0
    try:
        return sum(group._get_sequence_number_for_group() for group in members())  # type: ignore[attr-defined]
    except RuntimeError:
        return None
