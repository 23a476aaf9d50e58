"""A step behind which all ranks leave the training: what is due at its end."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from lastgasp.ports import StepLeft
from lastgasp.pytorch.loop.finish import step_left
from lastgasp.pytorch.loop.run import Run

NOTE = "the checkpoint that was due at step 4 was not written: all ranks had to leave that step"


@pytest.mark.parametrize(("every", "wanted", "due"), [(4, False, True), (0, True, True), (3, False, False)])
def test_the_local_rest_is_done_and_a_checkpoint_that_was_due_is_not_lost_without_a_word(
    every: int, wanted: bool, due: bool
) -> None:
    run: Any = MagicMock(every=every, step=3, rank=0, _wanted=wanted)
    run._capture.side_effect = StepLeft("STEP FINISH")
    with pytest.raises(StepLeft):
        Run.complete(run, 4)
    run._again_here.forget.assert_called_once_with()
    run.marks.step_end.assert_called_once_with(4)
    run.save.assert_not_called()
    expected = [NOTE + "; that of the next step is" * (every == 4)] * due
    assert [call.args[0] for call in run.engine.note.call_args_list] == expected


def test_what_else_is_raised_passes() -> None:
    run = MagicMock()
    with pytest.raises(ValueError, match="x"), step_left(run, 4, True):
        raise ValueError("x")
    run.engine.note.assert_not_called()
