"""What the callbacks of a Run say of each moment, without a training: `callbacks_child.py FOLDER` prints JSON."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import mindspore
from mindspore import Tensor, nn
from mindspore.train.callback import LossMonitor, ModelCheckpoint

import lastgasp_mindformers.run as module
from lastgasp.adapter import AdapterRun, Framework
from lastgasp.gasp.messages import Release
from lastgasp.gasp.rank_status import RankStatus
from lastgasp.topology import Place, data_parallel
from lastgasp_mindformers import topology
from lastgasp_mindformers.aux_state import AuxRecorder, reported_scale
from lastgasp_mindformers.callback import Boundary, LastGasp
from lastgasp_mindformers.digests import digests_of
from lastgasp_mindformers.left_files import LeftFiles
from lastgasp_mindformers.pynative import PynativeRun, protected
from lastgasp_mindformers.source import MindSporeSource
from lastgasp_mindformers.state import MindSporeState

PLACE = Place(rank=1, world_size=2, replicas=data_parallel(2))


def made(status: RankStatus) -> Any:
    """A Run whose session, data and files are not there."""
    run: Any = module.Run.__new__(module.Run)
    run.session, run.manifests, run._marks, run._faults = MagicMock(), MagicMock(), MagicMock(), MagicMock()
    run.place = run.session.place = PLACE
    run.life = AdapterRun.__new__(AdapterRun)
    run.life.session, run.life._training = run.session, run
    run.life.begun, run.life.alike_before = True, False
    run.life.framework = Framework(name="", kind_of=lambda error: "exception")
    run.life._completed, run.life._undo, run.life._release = ExitStack(), ExitStack(), ExitStack()
    aux: Any = MagicMock()
    run.state = MindSporeState(
        None, aux, status, before_update=status.before_update, step_completed=status.step_completed, finish=10.0
    )
    run._dataset, run._aux, run._ended, run._saves, run._first, run._epochs = None, b"", False, False, False, 0
    run._left_files, run._again, run._unseen = LeftFiles(), False, ""
    run._total, run._keeping = 0, MagicMock(on=False)
    run._network, run.source = nn.Dense(2, 2), MindSporeSource.__new__(MindSporeSource)
    run.selector, run._native = SimpleNamespace(resumed=12), SimpleNamespace(completed_before=0)
    return run


def callback_of(run: Any) -> Any:
    """A LastGasp that needs no directory."""
    callback = LastGasp.__new__(LastGasp)
    callback.run = run
    return callback


OUTPUTS: tuple[Any, ...] = (
    None,
    (1.0, False),
    (1.0, False, Tensor([8.0])),
    (1.0, False, 4.0, 2.0),
    (1.0, Tensor([1.0]), Tensor([[1.0, 2.0]])),
    (1.0, None, "labels"),
)
"""What train networks may return: nothing, no scale, a scale twice, logits, and whatever else."""


def pynative_at(done: int) -> list[int]:
    """What the pynative Trainer's first callback makes of `done` completed steps, four to an epoch."""
    run: Any = PynativeRun.__new__(PynativeRun)
    run.session, run._marks, run._aux, run._weights_only = MagicMock(), MagicMock(), b"", False
    run.place = run.session.place = PLACE
    run.life, run.manifests, run.source, run._first = MagicMock(), MagicMock(), MagicMock(), False
    run._checkpoint, run.selector = SimpleNamespace(no_load_optim=False), SimpleNamespace(resumed=done)
    run.options = SimpleNamespace(gasp=SimpleNamespace(directory=Path()))
    run._trainer = SimpleNamespace(train_epoch_step=4, train_num_epochs=5, train_dataset=MagicMock())
    status, aux = RankStatus(), MagicMock()
    run.state = MindSporeState(
        None, aux, status, before_update=status.before_update, step_completed=status.step_completed, finish=10.0
    )
    run.began(SimpleNamespace(global_step=done))
    return [run.state.numbers.step, run.state.numbers.epoch, run.state.numbers.within]


def sinks() -> list[int]:
    """The epoch of what was resumed from: four steps each on CPU, whatever `sink_size` says; the user began at 2."""
    found = []
    for done, over in ((0, 2), (3, 2), (4, 3), (6, 3)):
        run = made(RankStatus())
        run._epochs, run._size, run.selector = over, 4, SimpleNamespace(resumed=done)
        params = SimpleNamespace(list_callback=[], cur_step_num=0, batch_num=2, cur_epoch_num=over)
        run.begin(params)
        found.append(run.state.numbers.epoch)
    return found


def digests() -> list[bool]:
    """Of two equal networks; of one whose parameters, statistics, optimizer differ; and of one with bfloat16."""

    def trained(kind: Any = mindspore.float32, by: float = 0.0, named: str = "") -> Any:
        dense = nn.Dense(4, 4, weight_init="ones", bias_init="zeros")
        network = nn.SequentialCell(dense, nn.BatchNorm1d(4)).to_float(kind)
        if kind is not mindspore.float32:
            for param in network.get_parameters():
                param.set_dtype(kind)
        optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
        whole = nn.TrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), optimizer)
        for _, param in whole.parameters_and_names():
            if named and named in param.name:
                param.set_data(param + by)
        return digests_of(whole, AuxRecorder(whole).names)

    same, names = trained(), ["0.weight", "moments.0.weight", "moving_mean"]
    return [trained(by=by, named=name) == same for name in names for by in (0.0, 0.5)] + [
        trained(mindspore.bfloat16) == trained(mindspore.bfloat16),
        trained(mindspore.bfloat16) == trained(mindspore.bfloat16, 0.5, "0.weight"),
    ]


def holders() -> dict[str, Any]:
    """What two ranks hold, and what is reported about it, by parallel mode."""
    told = {}
    for mode in ("stand_alone", "data_parallel", "semi_auto_parallel"):
        mindspore.set_auto_parallel_context(parallel_mode=mode)
        told[mode] = [topology.replicas_of(2), topology.protection(2)]
    mindspore.reset_auto_parallel_context()
    return told


def main(folder: str) -> dict[str, Any]:
    """Step 13 of a run that resumes after the end of its third epoch of four steps."""
    status = RankStatus()
    run = made(status)
    saves, loss = ModelCheckpoint(prefix="x", directory=folder), LossMonitor()
    params = SimpleNamespace(
        list_callback=[saves, loss], cur_step_num=0, batch_num=4, cur_epoch_num=3, net_outputs=None
    )
    context = SimpleNamespace(original_args=lambda: params)
    front, back = Boundary(run), callback_of(run)
    told: dict[str, Any] = {}

    def inside() -> bool:
        status.hold(1.0)
        status.look()
        return not status.consistent

    back.on_train_begin(context)
    told["begins"] = [run.state.numbers.step, run.state.numbers.epoch, run.state.numbers.within]
    params.cur_step_num, params.cur_epoch_num = 13, 4
    back.on_train_step_begin(context)
    front.on_train_step_end(context)
    told["others"] = [status.step, inside()]
    back.on_train_step_end(context)
    told["over"] = inside()
    front.on_train_end(context)
    told["end"] = inside()
    back.on_train_end(context)
    told["ended"] = inside()
    run.others_begin()
    run.session.fault.return_value = Release(recovery=1, ending="saved", step=12, path="", reason="")
    run.end_with(ValueError("of a callback"))
    told["raised"] = inside()
    told["scale"] = [reported_scale(outputs) for outputs in OUTPUTS]
    told["pynative"] = pynative_at(12)
    options: Any = None
    told["sinks"] = sinks()
    told["pynative again"] = protected(lambda **given: given, None, {"checkpoint_path": "x"}, options)
    vars(module)["_home"] = None
    told["digests"], told["holders"] = digests(), holders()
    told["compared"] = run.session.compare_replicas.call_count
    module.begins(Path(folder))
    given = run.attach(None, {"callbacks": [back, loss]})["callbacks"]
    told["second"] = [type(one).__name__ for one in given]
    return told


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
