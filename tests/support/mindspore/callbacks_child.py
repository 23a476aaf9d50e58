"""What the callbacks of a Run say of each moment, without a training: `callbacks_child.py FOLDER` prints JSON."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from mindspore.train.callback import LossMonitor, ModelCheckpoint

import lastgasp_mindformers.run as module
from lastgasp.gasp.stand import Stand
from lastgasp_mindformers.callback import Boundary, LastGasp
from lastgasp_mindformers.state import MindSporeState


def made(stand: Stand) -> Any:
    """A Run whose session, data and files are not there."""
    run: Any = module.Run.__new__(module.Run)
    run.session, run.manifests, run._marks, run._faults = MagicMock(), MagicMock(), MagicMock(), None
    small: Any = MagicMock()
    run.state = MindSporeState(None, small, stand, updating=stand.updating, step_end=stand.step_end, finish=10.0)
    run._dataset, run._small, run._ended, run._saves = None, b"", False, False
    run.chooser, run._native = SimpleNamespace(resumed=12), SimpleNamespace(completed_before=0)
    return run


def callback_of(run: Any) -> Any:
    """A LastGasp that needs no directory."""
    callback = LastGasp.__new__(LastGasp)
    callback.run = run
    return callback


def main(folder: str) -> dict[str, Any]:
    """Step 13 of a run that goes on behind the end of its third epoch of four steps."""
    stand = Stand()
    run = made(stand)
    saves, loss = ModelCheckpoint(prefix="x", directory=folder), LossMonitor()
    params = SimpleNamespace(
        list_callback=[saves, loss], cur_step_num=0, batch_num=4, cur_epoch_num=3, net_outputs=None
    )
    context = SimpleNamespace(original_args=lambda: params)
    front, back = Boundary(run), callback_of(run)
    told: dict[str, Any] = {}

    def inside() -> bool:
        stand.look()
        return stand.inside

    back.on_train_begin(context)
    told["begins"] = [run.state.numbers.step, run.state.numbers.epoch, run.state.numbers.within]
    params.cur_step_num, params.cur_epoch_num = 13, 4
    back.on_train_step_begin(context)
    front.on_train_step_end(context)
    told["others"] = [stand.step, inside()]
    back.on_train_step_end(context)
    told["over"] = inside()
    front.on_train_end(context)
    told["end"] = inside()
    back.on_train_end(context)
    told["ended"] = inside()
    run.others_begin()
    run.session.fault.return_value = SimpleNamespace(ending="saved")
    run.state.small.close = run._source = MagicMock()
    run.end_with(ValueError("of a callback"))
    told["raised"] = inside()
    module._attached = True
    given = run.attach(None, {"callbacks": [back, loss]})["callbacks"]
    told["second"] = [type(one).__name__ for one in given]
    return told


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
