"""What can be told of a checkpoint before it is loaded: whether it is cut as this job cuts its model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lastgasp.checkpoint import Candidate

_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_\d+)?")


def misfit(candidate: Candidate, args: Any) -> str:
    """Why Megatron cannot load it, in words; empty where nothing speaks against it.

    Format torch has a folder for each tensor and pipeline rank, so that its names tell the sizes; torch_dist reshards.
    """
    holds = _sizes(candidate)
    asked = tuple(int(getattr(args, f"{kind}_model_parallel_size", 1) or 1) for kind in ("tensor", "pipeline"))
    if holds is None or holds == asked:
        return ""
    return f"holds TP{holds[0]} PP{holds[1]} in format torch, and the job asks for TP{asked[0]} PP{asked[1]}"


def _sizes(candidate: Candidate) -> tuple[int, int] | None:
    """Tensor and pipeline parallel size of a checkpoint of format torch; None where it is of another."""
    if candidate.manifest is not None:
        names = {Path(entry.path).parts[1] for entry in candidate.manifest.files if len(Path(entry.path).parts) > 2}
    else:
        names = {path.name for path in candidate.path.glob("mp_rank_*")}
    found = [match for name in names if (match := _FOLDER.fullmatch(name))]
    if not found:
        return None
    return 1 + max(int(match[1]) for match in found), 1 + max(int(match[2] or 0) for match in found)
