"""A gasp of one file: written and fsynced, seen by nobody until it is published."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lastgasp.checkpoint import Provenance, Staged
from lastgasp.checkpoint.addenda import add, added, ranks_named
from lastgasp.checkpoint.manifest import Fit
from lastgasp.checkpoint.retention import prune
from lastgasp.config import GaspConfig
from lastgasp.ports import Layout
from lastgasp.testing import faults
from lastgasp.topology import Place

log = logging.getLogger("lastgasp")


@dataclass(frozen=True)
class StagedGasp:
    """Implements `ports.SaveResult`.

    Args:
        present: the manifests that were there when this attempt began (`CheckpointSelector.present`).
        small: the auxiliary states that were at hand, by rank, with all buffers: the checkpoint may have left them out.
    """

    staged: Staged
    provenance: Provenance
    present: frozenset[str] | None = None
    aux: Mapping[int, bytes] = field(default_factory=dict)
    part: bytes = b""

    @property
    def path(self) -> str:
        """Where it will stand."""
        return str(self.staged.target)

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return self.staged.nbytes

    @property
    def first_byte_ns(self) -> int:
        """Wall-clock time of the first byte, ns since the epoch."""
        return self.staged.first_byte_ns or 0


def stage(write: Callable[[Staged], None], target: Path, layout: Layout, config: GaspConfig) -> Staged:
    """What `write` writes, under a temporary name beside `target`, durable.

    Raises:
        OSError: the disk refused; nothing is left.
    """
    staged = Staged(target, layout, sha256=config.sha256)
    try:
        write(staged)
        faults.fire_at("gasp_save")
        staged.seal()
    except BaseException:
        staged.discard()
        raise
    return staged


def publish(result: StagedGasp, layout: Layout, config: GaspConfig, place: Place) -> str:
    """Make it visible; then remove gasps beyond `keep`. What others of this attempt have committed before is kept.

    Where gasps are directories, another one of that name (a save that the fault cut short) is moved aside.

    Returns:
        What people must know about it; empty where there is nothing.

    Raises:
        OSError: the disk refused.
    """
    result.staged.publish(result.provenance, aside=True, present=result.present)
    note = result.staged.kept
    if note:
        note = f"{note}; {contribute(result.staged.target, layout, result.aux)}"
    fit = result.provenance.fit.number if isinstance(result.provenance.fit, Fit) else None
    prune(config, layout, Path(result.path), place, fit=fit)
    return note


def contribute(target: Path, layout: Layout, aux: Mapping[int, bytes]) -> str:
    """Add auxiliary states to a checkpoint that others of this job have committed. Never raises OSError.

    Returns:
        What people must know about it.
    """
    try:
        done = bool(aux) and add(target, layout, aux)
    except OSError as error:
        return f"the random state of {ranks_named(aux)} could not be added ({error}): a resume will not be bit-equal"
    if not done:
        return "no random state could be added to it"
    return f"the random state of {ranks_named(aux)} was added to it"


def with_added(record: dict[str, Any], path: Path, layout: Layout) -> None:
    """Complete the auxiliary states of a checkpoint's own record by those that were added to it, where it lacks any."""
    known, more = record.get("small"), added(path, layout)
    if isinstance(known, dict) and (lacking := {rank: data for rank, data in more.items() if rank not in known}):
        record["small"] = lacking | known
        log.info("%s: the random state of %s was added to it after it was saved", path, ranks_named(lacking))
