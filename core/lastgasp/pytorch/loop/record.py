"""The key `lastgasp` of a session's checkpoint: what a bit-equal resume needs besides the state itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lastgasp.adapter.preload import Preload
from lastgasp.checkpoint import DirectoryLayout
from lastgasp.checkpoint.manifest_lookup import has_manifest
from lastgasp.errors import CheckpointError, CheckpointMismatch
from lastgasp.pytorch.aux_state import AuxRecorder, AuxState, decode_aux, extra_of, own_aux, without_buffers
from lastgasp.pytorch.buckets import BucketLayout, Layout, rebuild
from lastgasp.pytorch.io import load_verified
from lastgasp.pytorch.loop import other_workers
from lastgasp.pytorch.loop.files import LAYOUT
from lastgasp.pytorch.loop.parts import ddp_of
from lastgasp.pytorch.loop.position_record import about, position_only
from lastgasp.pytorch.loop.state import TorchState
from lastgasp.pytorch.staged import with_added
from lastgasp.topology import Place

log = logging.getLogger("lastgasp")

KEY = "lastgasp"
SHARDED_FILE = "lastgasp.pt"
"""In the directory of a sharded checkpoint: what a loop holds besides tensors. Plain `dcp.load` does not look at it."""
VERSION = 1
_MISSING = "no random state of rank {} was available: unless that rank adds it, a resume will not be bit-equal"


def checkpoint_at(path: Path, preload: Preload | None = None) -> dict[str, Any]:
    """Read a session's checkpoint, with the auxiliary states that were added to it later.

    Args:
        preload: has loaded it while it was verified, or has not.

    Raises:
        CheckpointMismatch: no session has written it.
    """
    # Not weights_only: it is our own file, verified, and holds states of the user's objects.
    if preload is not None and (loaded := preload.take(path)) is not None:
        checkpoint = loaded
    elif path.is_dir():
        checkpoint = torch.load(path / SHARDED_FILE, map_location="cpu", weights_only=False)
    elif has_manifest(path, LAYOUT):
        checkpoint = load_verified(path, LAYOUT, map_location="cpu", weights_only=False)
    else:  # resume=<path> of one that the user trusts
        checkpoint = torch.load(path, map_location="cpu", weights_only=False)
    if not isinstance(checkpoint, dict) or KEY not in checkpoint:
        raise CheckpointMismatch(str(path), ["it was not written by a Session"])
    with_added(checkpoint[KEY], path, DirectoryLayout("*") if path.is_dir() else LAYOUT)
    return checkpoint


def buffers_of(
    step: int, aux_states: Mapping[int, bytes], recorder: AuxRecorder, ranks: list[int]
) -> dict[str, Tensor]:
    """The buffers at the end of `step`, of the first of `ranks` that still has them."""
    found = dict(recorder.buffers.on_device(step))
    rank = next((rank for rank in ranks if rank in aux_states), None)
    if rank is not None:
        found.update(decode_aux(aux_states[rank]).buffers)
    return found


def record_of(
    aux_states: Mapping[int, bytes], place: Place, per_rank: bool, buckets: Mapping[str, Layout], notes: list[str]
) -> dict[str, Any]:
    """What goes into the checkpoint.

    Args:
        per_rank: each rank has buffers of its own.
        buckets: of each model that is wrapped by DDP.
        notes: why a resume may not be bit-equal.
    """
    return {
        "version": VERSION,
        "world_size": place.world_size,
        "small": {rank: data if per_rank else without_buffers(data) for rank, data in aux_states.items()},
        "buckets": dict(buckets),
        "notes": notes,
        "workers": other_workers.running(),
    }


def not_alike(ranks: str) -> str:
    """What is noted in a checkpoint with what these ranks held, where others should have held the same and did not."""
    return f"the ranks did not hold the same when they were compared; this is what {ranks} held"


def notes_on(
    aux_states: Mapping[int, bytes], place: Place, items: Collection[str] = (), seeded: bool = False
) -> list[str]:
    """What of the ranks' auxiliary states will not be exact, in words.

    Args:
        items: the names in `TorchState.extra`; seeded: nobody needs their random state.
    """
    lost = [rank for rank in range(place.world_size) if rank not in aux_states]
    known = {rank: about(extra_of(data)) for rank, data in sorted(aux_states.items())}
    stale = [rank for rank, (is_stale, _) in known.items() if is_stale]
    mine = known.get(place.rank, (False, b""))[1]
    other = [rank for rank, (_, extra) in known.items() if mine and extra and extra != mine]
    named = _differing(items, [mine, *(known[rank][1] for rank in other)])
    notes = [f"TorchState(extra=...) of ranks {other} differs from that of rank {place.rank}{named}, which all of them "
             "will resume with: it is saved once"] if other else []  # fmt: skip
    if seeded:
        return notes
    return (
        notes
        + [_MISSING.format(rank) for rank in lost]
        + [
            f"rank {rank} ended inside a step that the others completed, and what it drew of random numbers or changed "
            "in buffers after its update is unknown: a resume will not be bit-equal"
            for rank in stale
        ]
    )


def position_of(record: Mapping[str, Any], place: Place) -> bytes:
    """Where this rank was in the data, or, if that was lost, another rank: all ranks are at the same place."""
    aux_states: Mapping[int, bytes] = record["small"]
    if place.rank in aux_states:
        return decode_aux(aux_states[place.rank]).extra
    return position_only(decode_aux(aux_states[min(aux_states)]).extra) if aux_states else b""


def aux_of(record: Mapping[str, Any], place: Place, path: str, note: Callable[[str], None]) -> AuxState | None:
    """This rank's auxiliary state; None if it was lost.

    Args:
        note: gets what this resume cannot restore; what the saver already knew of that is logged.

    Raises:
        CheckpointError: of a version that this code does not know.
    """
    if record.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has lastgasp state of version {record.get('version')!r}, this lastgasp reads version {VERSION}. "
            "Install the lastgasp that wrote it."
        )
    there = {_MISSING.format(rank) for rank in record["small"]}  # it was added later
    for text in record["notes"] if place.rank == 0 else ():
        if text not in there:
            log.warning("%s: %s", path, text)
    other_workers.resume(record.get("workers", {}), note)
    own = own_aux(record, place.rank, place.world_size, note)
    return decode_aux(own) if own is not None else None


def _differing(items: Collection[str], digests: Sequence[bytes]) -> str:
    """Which items of `extra` differ, as its digests say (`TorchState.extra_digest`)."""
    size = len(digests[0]) // len(items) if items else 0
    if not size or len(set(map(len, digests))) > 1:
        return ""
    names = [
        repr(name) for at, name in enumerate(items) if len({one[at * size : (at + 1) * size] for one in digests}) > 1
    ]
    return f" in {', '.join(names)}"


class Buckets:
    """The bucket layouts of all models that are wrapped by DDP."""

    def __init__(self, state: TorchState) -> None:
        self._models = {name: ddp for name, model in state.models.items.items() if (ddp := ddp_of(model)) is not None}
        self._looks = {name: BucketLayout(partial(self._models.get, name)) for name in self._models}

    def look(self) -> None:
        """At the end of a step."""
        other_workers.step_over()
        for one in self._looks.values():
            one.look()

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layouts known so far."""
        return {name: one.layout for name, one in self._looks.items() if one.layout}

    def restore(self, layouts: Mapping[str, Layout]) -> None:
        """Give each model the layout that was saved."""
        for name, layout in layouts.items():
            if name in self._models and not rebuild(self._models[name], layout):
                log.warning("DDP's buckets of model %s could not be laid out as before: with three ranks or more sums "
                            "may differ in the last bit", name)  # fmt: skip
