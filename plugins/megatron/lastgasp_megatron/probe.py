"""What is known of a checkpoint before it is loaded: whether it fits, and without a manifest whether it is complete.

Format torch: zip files with a CRC-32 of each record. Format torch_dist: `.metadata` names files and lengths,
`metadata.json` is written last (docs/facts/megatron.md §2). A flipped bit in torch_dist is not detected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader

from lastgasp.adapter.checkpoint import Candidate, Damage, Manifest, Verdict, zip_problem

_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")

_OF_TORCH_DIST = (".metadata", "common.pt", "metadata.json")


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


def drop_unfinished(checkpoint: Path, manifest: Manifest) -> None:
    """Remove what is left of a save in torch_dist into the directory of a gasp, which is whole without it.

    Raises:
        OSError: the disk refused.
    """
    named = _folders(manifest)
    whole = all((checkpoint.parent / entry.path).is_file() for entry in manifest.files)
    if whole and "metadata.json" not in named and any(map(_FOLDER.fullmatch, named)):
        for path in checkpoint.iterdir():
            if path.name not in named and (path.suffix == ".distcp" or path.name in _OF_TORCH_DIST):
                path.unlink()


def _folders(manifest: Manifest) -> set[str]:
    """What lies in the checkpoint's directory: files and folders."""
    return {Path(entry.path).parts[1] for entry in manifest.files if len(Path(entry.path).parts) > 1}


def _damage(checkpoint: Path, path: Path, detail: str) -> Damage:
    name = path.relative_to(checkpoint.parent).as_posix()
    return Damage(file=name, kind="missing" if "missing" in detail else "unreadable", detail=detail)


def misfit(candidate: Candidate, args: Any) -> str:
    """Why Megatron cannot load it, in words; empty if nothing prevents it.

    Format torch has a folder for each tensor, pipeline and expert parallel rank, so that its names
    show the sizes; torch_dist reshards.
    """
    holds = _sizes(candidate)
    if not holds:
        return ""
    kinds = ("tensor", "pipeline", "expert")
    tensor, pipeline, expert = (int(getattr(args, f"{kind}_model_parallel_size", 1) or 1) for kind in kinds)
    # A part of a name is left out where its size is 1, so that a second one may be either.
    asked = (tensor, *(size for size in (pipeline, expert) if size > 1))
    if holds == asked:
        return ""
    wanted = f"TP{tensor} PP{pipeline}" + (f" EP{expert}" if expert > 1 else "")
    return f"holds {_said(*holds)} in format torch, and the job asks for {wanted}"


def _said(tensor: int, second: int = 1, third: int = 1) -> str:
    if third > 1 or second == 1:
        return f"TP{tensor} PP{second}" + (f" EP{third}" if third > 1 else "")
    return f"TP{tensor} and PP{second} or EP{second}"


def _sizes(candidate: Candidate) -> tuple[int, ...]:
    """Tensor, pipeline and expert parallel size of a checkpoint of format torch, as far as its names hold them; empty
    where it is of another format.
    """
    if candidate.manifest is not None:
        names = _folders(candidate.manifest)
    else:
        names = {path.name for path in candidate.path.glob("mp_rank_*")}
    found = [match for name in names if (match := _FOLDER.fullmatch(name))]
    columns = zip(*(match.groups() for match in found), strict=True)
    return tuple(1 + max(map(int, column)) for column in columns if None not in column)
