"""The checkpoint of a step from one rank's live state, where each rank holds all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lastgasp.errors import NotSaveable
from lastgasp.pytorch.loop.record import KEY, buffers_of, not_alike, notes_on, record_of
from lastgasp.pytorch.weight_modes import EXCHANGED, which_weights


def dump(run: Any, step: int, aux: Mapping[int, bytes]) -> dict[str, Any]:
    """The checkpoint of `step`. Enters no collective; callable from any thread while the gate is closed.

    Args:
        run: the `loop.run.Run`; aux: auxiliary states by rank.

    Raises:
        NotSaveable: this rank's state is not that of `step`.
    """
    snapshot, has_copy = run.require(step), run.update.has_copy
    run.state.settle(snapshot)
    own = run.recorder.read(step)
    aux_states = dict(aux) if own is None else {run.rank: own, **aux}
    which = run.state.which_weights()
    as_now = not has_copy and which != which_weights(snapshot.groups)
    held, moved = ({}, "") if as_now else (run.moving.held(step), run.moving.missing(step))
    tensors = buffers_of(step, aux_states, run.recorder, [run.buffer_rank, run.rank]) | held
    notes = list(snapshot.notes)
    if not run.life.alike:
        notes.append(not_alike(f"rank {run.rank}"))
    if run.buffer_rank not in aux_states and any(True for _ in run.state.container.buffers()):
        notes.append(f"buffers are those of rank {run.rank}, because those of rank {run.buffer_rank} were lost")
    size = run.place.world_size
    counted = range(size) if run.state.per_rank_buffers(size) else [run.buffer_rank]
    of_others = run.recorder.note_on_buffers(aux_states, run.rank, counted)
    missing = run.state.extra_states.missing(snapshot.modules), moved, of_others
    notes += [*filter(None, missing), *run.not_saved.notes()]
    notes += notes_on(aux_states, run.place, run.state.extra, seeded=run.state.elastic is not None)
    checkpoint: dict[str, Any] = run.state.dump(snapshot, tensors, run.update.copies if has_copy else None)
    if run.require(step) is not snapshot or run.update.has_copy != has_copy:
        raise NotSaveable(f"step {step} ended while it was being dumped")
    if not has_copy and run.state.which_weights() != which:
        raise NotSaveable(EXCHANGED)
    for note in notes:
        run.engine.note(note)
    checkpoint[KEY] = record_of(aux_states, run.place, run.per_rank, run.buckets.layouts, notes)
    checkpoint[KEY] |= {"as_set": run.state.as_set.values, **run.schedules.record(step)}
    return checkpoint
