"""Where a rank stands in its data, and how it comes back there: one protocol for all adapters of torch.

`position_of(loader, recorder)` makes the `LoaderPosition` of a loader, by the adapter that is registered for its type
(`register_loader`) or else by what the loader can do: the sampler of a map-style DataLoader is repeated without
loading, a loader with `state_dict` restores its own state, anything else is iterated again. The adapter of a framework
that iterates its loaders itself holds an `EpochPosition`; that of a custom training loop calls each position itself.
"""

from lastgasp.pytorch.position import fabric as _fabric
from lastgasp.pytorch.position import known as _known
from lastgasp.pytorch.position.accelerated import fetches_ahead
from lastgasp.pytorch.position.compared import is_compared
from lastgasp.pytorch.position.epoch import EpochPosition
from lastgasp.pytorch.position.protocol import (
    CHANGED,
    DESCRIBED,
    ELASTIC,
    IN_TURN,
    MAP,
    STATEFUL,
    STREAM,
    UNORDERED,
    WORKERS,
    LoaderPosition,
    PassStart,
    other_ranks,
)
from lastgasp.pytorch.position.records import EpochRecord, decode_epoch, is_epoch_record
from lastgasp.pytorch.position.registry import Factory, builtin_position, position_of, register_loader
from lastgasp.pytorch.position.samplers import iterate, untrack_sampler

__all__ = [
    "CHANGED",
    "DESCRIBED",
    "ELASTIC",
    "IN_TURN",
    "MAP",
    "STATEFUL",
    "STREAM",
    "UNORDERED",
    "WORKERS",
    "EpochPosition",
    "EpochRecord",
    "Factory",
    "LoaderPosition",
    "PassStart",
    "builtin_position",
    "decode_epoch",
    "fetches_ahead",
    "is_compared",
    "is_epoch_record",
    "iterate",
    "other_ranks",
    "position_of",
    "register_loader",
    "untrack_sampler",
]
del _fabric, _known
