"""Save and load torch objects with digests. `torch.save` streams through a `HashingWriter`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import torch

from lastgasp.checkpoint import FileEntry, SingleFile, Staged, VerifiedFile, verify
from lastgasp.errors import DamagedCheckpoint
from lastgasp.ports import Layout

_crc_lock = threading.Lock()


def save_verified(obj: object, staged: Staged, relative: str | None = None, **options: Any) -> None:
    """`torch.save(obj)` into one file of `staged`; durable after `staged.seal()`.

    torch's own CRC-32 is left out: it costs 0.5 s per GB, `torch.load` never checks it, and the manifest
    holds better digests (`docs/facts/limits.md` §5, §6).

    Args:
        obj: what to save; relative: the file, as in `Staged.open`; options: for `torch.save`.

    Raises:
        OSError: the disk refused.
    """
    with without_crc32():
        # torch wants IO[bytes] and uses write and flush of it.
        torch.save(obj, cast("IO[bytes]", staged.open(relative)), **options)


def load_verified(path: Path, layout: Layout | None = None, *, threads: int = 2, **options: Any) -> Any:
    """`torch.load` a checkpoint and verify it at the same time.

    No byte is unpickled before its chunk has verified, and nothing is returned before all have. Tensors own
    their memory: none of them aliases a mapping of the file.

    Args:
        path: a single-file checkpoint; layout: how it lies, `SingleFile` with its suffix by default.
        threads: how many read and hash ahead.
        options: for `torch.load`; `mmap` is not among them.

    Raises:
        DamagedCheckpoint: it does not verify; lists every damage.
    """
    with VerifiedFile(path, layout or SingleFile(path.suffix), threads=threads) as file:
        return _load(file, options)


def load_entry(path: Path, entry: FileEntry, *, threads: int = 2, **options: Any) -> Any:
    """The same for one file of a checkpoint, at `path`, by what its manifest says about it. Raises the same."""
    with VerifiedFile(path, entry=entry, threads=threads) as file:
        return _load(file, options)


def _load(file: VerifiedFile, options: dict[str, Any]) -> Any:
    try:
        # torch wants IO[bytes] and uses seek, tell, read and readinto of it.
        loaded = torch.load(cast("IO[bytes]", file), mmap=False, **options)
    except Exception:
        file.finish()  # damaged bytes explain the error better than the error does
        raise
    file.finish()
    return loaded


def load_mapped(path: Path, layout: Layout | None = None, **options: Any) -> Any:
    """Verify a whole file, then `torch.load` it by `mmap`: its tensors are pages of the file, read when used.

    Args:
        path: a single-file checkpoint; layout: how it lies, `SingleFile` with its suffix by default.
        options: for `torch.load`.

    Raises:
        DamagedCheckpoint: it does not verify; lists every damage.
    """
    verdict = verify(path, layout or SingleFile(path.suffix))
    if not verdict.ok:
        raise DamagedCheckpoint(str(path), verdict.reasons)
    return torch.load(path, mmap=True, **options)


@contextlib.contextmanager
def without_crc32() -> Iterator[None]:
    """Switch torch's CRC-32 off inside the block, one block at a time; the option is process-wide."""
    with _crc_lock:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            yield
        finally:
            torch.serialization.set_crc32_options(before)
