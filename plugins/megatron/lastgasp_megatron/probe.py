"""What can be said of a checkpoint without a manifest: whether its files are whole, as far as their formats tell.

Format torch: zip files with a CRC-32 of each record. Format torch_dist: `.metadata` names files and lengths,
`metadata.json` is written last (docs/facts/megatron.md §2). A flipped bit in torch_dist is not seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader

from lastgasp.checkpoint import Damage, Verdict
from lastgasp.checkpoint.whole import zip_problem

_BLOCK = 1 << 20


def probe(checkpoint: Path, step: int | None, share: tuple[int, int] = (0, 1)) -> Verdict:
    """The verdict on every i-th of n files, for `share` (i, n). Whatever is wrong is a damage, not an exception."""
    damages = tuple(_damages(checkpoint, share))
    return Verdict(path=checkpoint, step=step, ok=not damages, damages=damages)


def _damages(checkpoint: Path, share: tuple[int, int]) -> Iterator[Damage]:
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    if not files:
        yield _damage(checkpoint, checkpoint, "holds no file")
    if _is_distributed(checkpoint):
        yield from _distributed(checkpoint) if share[0] == 0 else ()
        return
    if not any(path.parent.name.startswith("mp_rank_") for path in files):
        yield _damage(checkpoint, checkpoint, "is neither of format torch nor of torch_dist")
    for path in files[share[0] :: share[1]]:
        problem = zip_problem(path) if path.suffix == ".pt" else ""
        if problem:
            yield _damage(checkpoint, path, problem)
    for folder in sorted(checkpoint.glob("mp_rank_*")) if share[0] == 0 else ():
        if not (folder / "model_optim_rng.pt").exists():
            yield _damage(checkpoint, folder / "model_optim_rng.pt", "file is missing")


def _is_distributed(checkpoint: Path) -> bool:
    return (checkpoint / "metadata.json").exists() or any(checkpoint.glob("*.distcp"))


def _distributed(checkpoint: Path) -> Iterator[Damage]:
    try:
        json.loads((checkpoint / "metadata.json").read_text())
    except (OSError, ValueError) as error:
        yield _damage(checkpoint, checkpoint / "metadata.json", f"cannot be read: {error}")
    try:
        metadata = FileSystemReader(checkpoint).read_metadata()
    except Exception as error:  # unpickling damaged bytes may raise anything
        yield _damage(checkpoint, checkpoint / ".metadata", f"cannot be read: {type(error).__name__}: {error}")
        return
    ends: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in sorted(ends.items()):
        path = checkpoint / name
        size = path.stat().st_size if path.exists() else -1
        if size < end:
            what = f"has {size} bytes, and at least {end} are needed" if size >= 0 else "file is missing"
            yield _damage(checkpoint, path, what)


def _damage(checkpoint: Path, path: Path, detail: str) -> Damage:
    name = path.relative_to(checkpoint.parent).as_posix()
    return Damage(file=name, kind="missing" if "missing" in detail else "unreadable", detail=detail)
