"""Before anybody loads: the newest checkpoint with a manifest is verified, and what is damaged is moved away.

On rank 0, in `tft_start_processor`, which comes before the process group is made: the others cannot load before that.
The job's own code loads, by its own tracker; where that is Megatron's, it is repaired.
"""

from __future__ import annotations

import logging
from pathlib import Path

from lastgasp.adapter import Layout, NoGoodCheckpoint, Place
from lastgasp.adapter.checkpoint import Candidate, candidates, progress_bar, put_back, quarantine, verify
from lastgasp.adapter.files import remove_stale_temps, write_atomically
from lastgasp_mindio import settings
from lastgasp_mindio.notices import say

log = logging.getLogger("lastgasp")

TRACKER = "latest_checkpointed_iteration.txt"


def verify_newest() -> None:
    """Verify; see above. With LASTGASP_RESUME=never nothing is looked at.

    Raises:
        NoGoodCheckpoint: all checkpoints are damaged.
    """
    config, layout = settings.config(), settings.layout()
    if config.resume == "never":
        return
    if config.resume != "auto":
        say(f"LASTGASP_RESUME={config.resume} has no effect: the job's own code chooses what it loads")
    folder = config.directory
    if not folder.is_dir():
        return
    remove_stale_temps(folder)
    put_back(folder, layout)
    reasons: dict[str, str] = {}
    unverified = False
    for candidate in candidates([folder], layout):
        why = _judged(candidate, layout)
        if why is None:
            unverified = True
            continue
        if not why:
            log.info("%s is verified", candidate.path)
            break
        reasons[str(candidate.path)] = why
        log.warning("%s is not used: %s", candidate.path, why)
    else:
        if reasons and not unverified:
            raise NoGoodCheckpoint(str(folder), reasons)
        if reasons:
            log.warning("%s: no checkpoint with a manifest is good; what is left cannot be verified", folder)
    if reasons:
        _repair_tracker(folder, layout)


def passed_over(step: int, place: Place) -> str:
    """What is to be said where training began with `step` although a newer one was saved; else an empty string.

    In a restart only what its own job has saved counts: the directory may hold newer dumps of an abandoned run.
    """
    config, layout = settings.config(), settings.layout()
    if config.resume == "never" and not place.attempt:
        return ""
    for candidate in candidates([config.directory], layout):
        manifest = candidate.manifest
        if manifest is None or candidate.problem:
            continue
        own = manifest.job == place.job and manifest.creator.time_ns >= place.since_ns
        if manifest.step > step and (own or not place.attempt):
            return (
                f"training began with step {step} although step {manifest.step} was saved to {candidate.path}: "
                f"{manifest.step - step} steps are done again. The job's own code loads from elsewhere "
                "(Megatron: --load must name the directory of --save)"
            )
    return ""


def _judged(candidate: Candidate, layout: Layout) -> str | None:
    """Why it must not be loaded, and moved away where that is proven; empty: it is good; None: it has no manifest."""
    if candidate.manifest is None and not candidate.proven:
        return None
    why, proven = [candidate.problem] if candidate.problem else [], candidate.proven
    if candidate.manifest is not None and not why:
        with progress_bar(f"verifying {candidate.path.name}") as progress:
            verdict = verify(candidate.path, layout, manifest=candidate.manifest, progress=progress)
        why, proven = verdict.reasons, verdict.proven
    quarantine(candidate, why, proven=proven, layout=layout)
    return "; ".join(why)


def _repair_tracker(folder: Path, layout: Layout) -> None:
    """Megatron's tracker names what was moved away: make it name the newest that is left."""
    tracker = folder / TRACKER
    if not tracker.exists():
        return
    left = [step for path in layout.discover(folder) if layout.parts(path) and (step := layout.step(path)) is not None]
    text = tracker.read_text(errors="replace").strip()
    if left and text != str(max(left)) and not (text.isdigit() and int(text) in left):
        write_atomically(tracker, str(max(left)).encode())
        log.warning("%s says %d now (it said %r)", tracker, max(left), text)
