"""Before anybody loads: the newest checkpoint with a manifest is verified, and what is damaged is moved away.

On rank 0, in `tft_start_processor`, which comes before the process group is made: the others cannot load before that.
The job's own code loads, by its own tracker; where that is Megatron's, it is repaired.
"""

from __future__ import annotations

import logging
from pathlib import Path

from lastgasp.adapter import Layout, NoGoodCheckpoint, Place, clock
from lastgasp.adapter.checkpoint import (
    Candidate,
    DirectoryLayout,
    SingleFile,
    candidates,
    progress_bar,
    put_back,
    quarantine,
    verify,
)
from lastgasp.adapter.files import remove_stale_temps, write_atomically
from lastgasp_mindio import manifests, settings
from lastgasp_mindio.notices import say

log = logging.getLogger("lastgasp")

TRACKER = "latest_checkpointed_iteration.txt"
LIMIT = 240.0
"""Seconds for all reading; torch's store waits 300 s, and Megatron's process group ten minutes, for rank 0."""


class _Late(Exception):
    """The time is over."""


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
    unverified, deadline = False, clock.monotonic() + LIMIT
    for candidate in candidates([folder], layout):
        try:
            why = _judged(candidate, layout, deadline)
        except _Late as late:
            log.warning("%s is not verified: %s; the job's own code loads it as it is", candidate.path, late)
            break
        if why is None:
            unverified = unverified or _finished(candidate.path, layout)
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


def _judged(candidate: Candidate, layout: Layout, deadline: float) -> str | None:
    """Why it must not be loaded, and moved away where that is proven; empty: it is good; None: it has no manifest.

    Raises:
        _Late: it could not be read until `deadline`.
    """
    if candidate.manifest is None and not candidate.proven:
        return None
    why, proven = [candidate.problem] if candidate.problem else [], candidate.proven
    if candidate.manifest is not None and not why:
        with progress_bar(f"verifying {candidate.path.name}") as bar:

            def tell(done: int, total: int) -> None:
                if bar is not None:
                    bar(done, total)
                if done < total and clock.monotonic() > deadline:
                    raise _Late(f"{done} of {total} bytes were read in {LIMIT:g} s")

            verdict = verify(candidate.path, layout, manifest=candidate.manifest, progress=tell)
        why, proven = verdict.reasons, verdict.proven
    quarantine(candidate, why, proven=proven, layout=layout)
    return "; ".join(why)


def _repair_tracker(folder: Path, layout: SingleFile | DirectoryLayout) -> None:
    """Megatron's tracker names what was moved away: make it name the newest that is left."""
    tracker = folder / TRACKER
    if not tracker.exists():
        return
    there = [path for path in layout.discover(folder) if layout.parts(path) and _finished(path, layout)]
    left = [step for path in there if (step := layout.step(path)) is not None]
    text = tracker.read_text(errors="replace").strip()
    if left and text != str(max(left)) and not (text.isdigit() and int(text) in left):
        write_atomically(tracker, str(max(left)).encode())
        log.warning("%s says %d now (it said %r)", tracker, max(left), text)


def _finished(path: Path, layout: SingleFile | DirectoryLayout) -> bool:
    """Nothing follows its number, if it has one: what is being written has another name (`iter_0000012_tmp`).

    An ending that the user's own pattern has does not count.
    """
    name = path.name.removesuffix(manifests.ending(layout))
    return name[-1:].isdigit() or not any(character.isdigit() for character in name)
