"""The end of a step that was cut short after its last update, or that is the last one before all leave."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lastgasp.ports import StepLeft
from lastgasp.pytorch.aux_state import NOTHING

log = logging.getLogger("lastgasp")


@contextmanager
def step_left(run: Any, step: int, due: bool) -> Iterator[None]:
    """Where all ranks leave the training at the end of `step` (`ports.StepLeft`), do the local rest of that step.

    Args:
        run: the `loop.run.Run`; due: a checkpoint was. Who moves a rank does not wait for as long as that takes, and
            a new process, which has no part in this step, could not write it with the others.
    """
    try:
        yield
    except StepLeft:
        run._again_here.forget()
        run.marks.step_end(step)
        if due and run.rank == 0:
            then = "; that of the next step is" if run.every and step % run.every == 0 else ""  # `LoopAgain.ready`
            note = f"the checkpoint that was due at step {step} was not written: all ranks had to leave that step{then}"
            log.warning("%s", note)
            run.engine.note(note)
        raise


def finish_step(run: Any, cause: str) -> bool:
    """All updates of the step are done, but the rest of the loop's body is not: call the step complete.

    What the rest would have done is unknown, except for schedulers: they are stepped as in the previous step.

    Args:
        run: the `loop.run.Run`; cause: what has ended the body, for a note.

    Returns:
        Whether the state is now that of a complete step.
    """
    update, step = run.update, run.step + 1
    if update.inside or update.updates < max(1, update.usual):
        return False
    try:
        run.schedules.catch_up(step)
    except Exception:  # a user's scheduler; the state is then unknown
        log.exception("a scheduler raised while the step was being completed: the step cannot be saved here")
        return False
    run.capture_aux(step, settled=True, cut=True)
    snapshot = run.state.snapshot(step, run.book.epoch)
    snapshot.notes.append(f"the loop's body of step {step} was cut short after its update by {cause}; "
                          "what follows the update there was not repeated")  # fmt: skip
    run.finished(snapshot)
    run.engine.status.cut_short = step
    update.close(NOTHING)
    run.recorder.queued.mark()
    run.engine.step_completed(step)
    return True
