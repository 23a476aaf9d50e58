"""Compares a checkpoint with its manifest. Every outcome is a verdict; nothing on disk raises an error."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from lastgasp.errors import ConfigError
from lastgasp.ports import Layout

from .chunks import Checked, Chunk, ChunkReader, chunks_of
from .manifest import Manifest, ManifestProblem
from .manifest_lookup import read_pair
from .structure import compare
from .verdict import Damage, Verdict, of_manifest

THREADS = 2
"""How many read at the same time."""
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all, from any thread, one call at a time."""


def verify(
    checkpoint: Path,
    layout: Layout,
    *,
    manifest: Manifest | None = None,
    share: tuple[int, int] = (0, 1),
    progress: Progress | None = None,
    read_by_others: Collection[str] = (),
) -> Verdict:
    """Check names, sizes and the share's chunk digests.

    Content is checked by its xxh3-128 chunk digests; a SHA-256 in the manifest is for signatures and is not
    recomputed here. Files are read, not mapped: a failed read of a mapping would kill the process.

    Args:
        checkpoint: the checkpoint; layout: how it lies.
        manifest: what to compare with; None reads it from disk. Ranks that agreed on one give it here.
        share: (i, n) checks the chunks whose number modulo n is i. Names and sizes are always checked.
        progress: called with bytes done.
        read_by_others: files, by their names in the manifest, whose content is verified when they are loaded.

    Raises:
        ConfigError: an invalid share.
    """
    if not 0 <= share[0] < share[1]:
        raise ConfigError("share", share, "(i, n) with 0 <= i < n", "Give (rank, world_size).")
    found = read_pair(checkpoint, layout) if manifest is None else manifest
    if isinstance(found, ManifestProblem):
        return Verdict(path=checkpoint, step=None, ok=False, damages=(of_manifest(checkpoint, found),))
    damages, sound = compare(checkpoint, layout, found)
    mine = [entry for entry in sound if entry.path not in read_by_others]
    chunks = chunks_of(checkpoint, mine)[share[0] :: share[1]]
    damages += ChunkReader(chunks, _teller(chunks, progress)).run(THREADS)
    return Verdict(path=checkpoint, step=found.step, ok=not damages, damages=tuple(damages))


def _teller(chunks: list[Chunk], progress: Progress | None) -> Checked | None:
    """Counts bytes for `progress`."""
    if progress is None:
        return None
    done, total = 0, sum(chunk.span[1] for chunk in chunks)

    def tell(chunk: Chunk, _: Damage | None) -> None:
        nonlocal done
        done += chunk.span[1]
        progress(done, total)

    return tell
