"""Which checkpoint is meant by a path that the user has given, and what else is there."""

from __future__ import annotations

from pathlib import Path

from lastgasp.adapter import ConfigError
from lastgasp.adapter.checkpoint import is_moved_away
from lastgasp.adapter.mindspore import LEGACY
from lastgasp_mindformers.listing import CheckpointCatalog
from lastgasp_mindformers.steering import ResumeRequest


def asked_by(request: ResumeRequest) -> Path | None:
    """The one checkpoint that the user named; None where the newest good one is wanted."""
    if request.load is None or not request.resume:
        return None
    if request.load.is_file():
        monitored = request.load.parent.name.startswith("rank_")
        return _named(request.load, "load_checkpoint") if monitored else None
    if isinstance(request.resume, str):
        own = request.resume if request.resume.endswith((".ckpt", ".safetensors")) else f"{request.resume}.safetensors"
        return _named(request.load / "rank_0" / own, "resume_training")
    return request.load if request.newer and request.load.name.startswith("iteration_") else None


def owner_of(path: Path, catalog: CheckpointCatalog) -> Path:
    """The checkpoint of a path that the user gave for `resume`: its own, or that of one of its files."""
    for folder, layout in catalog.places:
        for checkpoint in layout.discover(folder):
            if path == checkpoint or path in layout.files(checkpoint).values():
                return checkpoint
    return _named(path, "resume")


def _named(path: Path, field: str) -> Path:
    """The checkpoint of a path that may be that of one of its files."""
    directory = path.parent.parent if path.parent.name.startswith("rank_") else path.parent
    if directory != path.parent:
        title = LEGACY.title_of(f"{path.parent.name}/{path.name}") or LEGACY.title_of(_of_folder(path))
        if title is None:
            raise ConfigError(field, str(path), "a file that CheckpointMonitor wrote", "Give its directory instead.")
        return directory / title
    return path


def _of_folder(path: Path) -> str:
    """The same with the rank of its folder, as MindFormers replaces it."""
    rank = path.parent.name.removeprefix("rank_")
    head, _, tail = path.name.partition("_rank_")
    return f"{path.parent.name}/{head}_rank_{rank}{tail.lstrip('0123456789')}"


def holds_others(path: Path) -> bool:
    """Whether MindFormers may find weights there that are not checkpoints of a training, which it must judge itself."""
    if not path.is_dir():
        return path.exists()
    for entry in path.rglob("*"):
        relative = entry.relative_to(path)
        moved = any(part.startswith(".") or is_moved_away(part) for part in relative.parts)
        known = relative.parts[0].startswith("iteration_") or LEGACY.title_of(relative.as_posix()) is not None
        if entry.suffix in (".ckpt", ".safetensors") and not moved and not known and entry.is_file():
            return True
    return False
