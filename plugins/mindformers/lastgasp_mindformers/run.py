"""What belongs to one training: session, state, chooser, manifests; its beginning and its end."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore

from lastgasp.config import check_writable
from lastgasp.deferred_source import DeferredSource
from lastgasp.gasp.rank_status import Released
from lastgasp.launch import framework_verdict
from lastgasp.ports import Layout
from lastgasp.replicas import Digests
from lastgasp.session import Session, leave
from lastgasp.steps.attach import Marking
from lastgasp.testing import faults
from lastgasp.undoing import run_all
from lastgasp_mindformers import begun
from lastgasp_mindformers.aux_state import AuxRecorder, Numbers, decode, restore_random
from lastgasp_mindformers.callback import Boundary, LastGasp
from lastgasp_mindformers.digests import digests_of, unknown_yet
from lastgasp_mindformers.exits import cause_of, is_success, kind_of, verdict_of
from lastgasp_mindformers.gate import gate_of
from lastgasp_mindformers.layouts import LEGACY, PLAIN
from lastgasp_mindformers.manifests import Manifests
from lastgasp_mindformers.marks import LoopMarks
from lastgasp_mindformers.monitors import is_monitor, searched
from lastgasp_mindformers.native import monitor_of, native_of
from lastgasp_mindformers.plain import load
from lastgasp_mindformers.ranks import connect, device, place_of, rank_and_size, versions
from lastgasp_mindformers.reload import MindFormersSelector
from lastgasp_mindformers.settings import Options
from lastgasp_mindformers.source import MindSporeSource
from lastgasp_mindformers.state import MindSporeState
from lastgasp_mindformers.topology import (
    advice,
    embedded_backend,
    is_broadcast,
    left_to_mindspore,
    protection,
    replicas_of,
)
from lastgasp_mindformers.unused import UNUSED

log = logging.getLogger("lastgasp")

_attached = False
"""A training of this process was protected. Another one would go on from the first one's checkpoints."""


class Run:
    """One training of this process; made before the network is compiled, in MindFormers before it is built.

    Args:
        options: what the user asked for.

    Raises (constructor):
        ConfigError: a directory that cannot be written.
        ControlError and its kin: the controller refused this rank or is not there.
    """

    def __init__(self, options: Options) -> None:
        UNUSED.used()
        self.options = options
        check_writable(options.gasp.directory)
        self.place = place = place_of(replicas_of(rank_and_size()[1]))
        self._source = DeferredSource(place.rank)
        framework = " ".join(f"{name} {version}" for name, version in versions().items())
        marking = Marking(config=options.marks, framework=framework, device=place.rank)
        contact, backend = connect(place), embedded_backend()
        self.session = Session(options.gasp, place, self._source, contact, marking, backend=backend)
        self._source.mark = self.session.mark("save_checkpoint")
        self.selector = MindFormersSelector(options, place, self.session.gather, self.session.note)
        self.manifests = Manifests(
            place,
            self.session.gather,
            self.session.status,
            aux=self._source.capture,
            finished=lambda: begun.finished(options.gasp.directory),
        )
        self.state: MindSporeState | None = None
        self._marks = LoopMarks(self.session)
        self._faults: Any = _faults(place.rank)
        self._aux = b""
        self._seen = 0
        self._dataset: Any = None
        self._ended = self._saves = self._first = self._left = False
        self.session.register(device(), versions())

    # -- start ------------------------------------------------------------------------------------

    def attach(self, model: Any, arguments: dict[str, Any]) -> dict[str, Any] | None:
        """Protect this call of `Model.train`.

        Args:
            model: MindSpore's.
            arguments: those of the call, by name; `callbacks` is a list.

        Returns:
            The arguments that the original gets; None where all epochs are trained already.

        Raises:
            ConfigError, CheckpointError: what is asked for cannot be protected; no good checkpoint is left.
        """
        global _attached
        given = list(arguments["callbacks"])
        if _attached:
            self._left = True
            log.warning("this process has trained before: lastgasp protects only its first Model.train")
            # A LastGasp of the first one would speak for a session that is closed.
            return arguments | {"callbacks": [one for one in given if not isinstance(one, LastGasp)]}
        _attached = True
        ours = next((callback for callback in given if isinstance(callback, LastGasp)), None) or _made(self.options)
        others = [callback for callback in given if callback is not ours]
        arguments = arguments | {"callbacks": [Boundary(self), *others, ours]}
        ours.run = self
        if left_to_mindspore():
            self._left = True
            log.warning("MS_ENABLE_TFT: saving after a fault is left to TrainFaultTolerance")
            return arguments
        network = model.train_network
        self._native = native_of(network, others, self.options.gasp.directory, self.place.world_size)
        if not _is_mindformers(others):
            self._dataset = arguments["train_dataset"]
            arguments, self._aux = load(self.selector, network, arguments, self._searched(others))
        else:
            self._aux = self.selector.aux
        self._bind(network)
        if int(arguments.get("initial_epoch") or 0) >= int(arguments["epoch"]):
            log.warning("all %s epochs are trained: there is nothing left to do", arguments["epoch"])
            if self._dataset is not None:
                self._dataset.set_init_step(0)  # as `trained`
            return None
        return arguments

    def _searched(self, callbacks: list[Any]) -> list[tuple[Path, Layout]]:
        """Where checkpoints of a plain training may stand: LastGasp's directory, and those of ModelCheckpoint."""
        home, found = self.options.gasp.directory.absolute(), searched(callbacks, self.place.rank, self.session.gather)
        own: list[tuple[Path, Layout]] = [(home, LEGACY)]
        if not any(folder == home for folder, _ in found):
            own.append((home, PLAIN))
        return [*own, *found]

    def _bind(self, network: Any) -> None:
        session = self.session
        self.state = MindSporeState(
            gate_of(network),
            AuxRecorder(network),
            session.status,
            before_update=session.before_update,
            step_completed=lambda step: session.step_completed(
                step
            ),  # looked up each time: the first one is another method
            finish=session.config.finish_timeout,
            readable=mindspore.get_context("device_target") == "CPU",
        )
        self._source.inner = MindSporeSource(self.state, self._native, self.place, session.config)
        self._network = network
        if self.place.rank == 0:
            level = logging.WARNING if advice(self.place.world_size) else logging.INFO
            log.log(level, "%s", protection(self.place.world_size))

    def begin(self, params: Any) -> None:
        """Training starts, or goes on from what was loaded."""
        self.manifests.bind(params.list_callback)
        self._marks.begin(params.list_callback)
        if self.state is None:
            self.session.defer_to_framework()
            return
        if self._aux:
            aux = decode(self._aux)
            restore_random(aux)
            self.state.aux.restore_scaling(aux)
        done = self._native.completed_before or int(self.selector.resumed or 0)
        if monitor_of(params.list_callback) is None:
            params.cur_step_num = done  # MindSpore would count from 0 again, and so would all other callbacks
        self._offset = done - int(params.cur_step_num)
        self._saves = any(is_monitor(callback) for callback in params.list_callback)
        within = (done - 1) % int(params.batch_num) + 1 if done else 0  # as CheckpointMonitor names that step
        self.state.begin(Numbers(step=done, epoch=_epoch(params, done), within=within))
        self._seen = done
        self._compare(unknown_yet if is_broadcast() else self._digests)
        self._first = True
        self.session.training_started(done, durable=done if done and done == self.selector.resumed else 0)
        self.session.take_sigterm()

    def _digests(self) -> Digests:
        assert self.state is not None
        return digests_of(self._network, self.state.aux.names)

    def _compare(self, digests: Callable[[], Digests]) -> None:
        """Who holds the same? A parallel mode is no proof. All ranks together."""
        self.session.compare_replicas(digests)
        self.place = self.manifests.place = self.session.place
        assert isinstance(self._source.inner, MindSporeSource)
        self._source.inner.place = self.place

    # -- steps ------------------------------------------------------------------------------------

    def _numbers(self, params: Any, outputs: Any = None) -> Numbers:
        """Of the step under way, as CheckpointMonitor counts: `cur_step_num` tells it already."""
        current = int(params.cur_step_num)
        within = (current - 1) % int(params.batch_num) + 1
        return Numbers(self._offset + current, int(params.cur_epoch_num), within, _loss_scale(outputs))

    def step_begin(self, params: Any) -> None:
        """Behind all other callbacks, before the graph.

        Raises:
            Released: a recovery took place.
        """
        if self.state is None:
            return
        coming = self._numbers(params)
        self._fire("data", coming.step - 1)
        self._marks.step_begin(coming.step)
        self.state.step_begin(coming)
        self.session.progress(
            "backward"
        )  # the graph waits for the other ranks: who is elsewhere is to blame for a hang
        self._fire("forward", coming.step - 1)

    def step_end(self, params: Any) -> None:
        """Before all other callbacks. Raises Released where a gasp has begun meanwhile."""
        if self.state is None:
            return
        numbers = self._numbers(params, params.net_outputs)
        self._fire("after_update", numbers.step - 1)
        self.state.step_end(numbers, saves=self._saves)
        if self._first:
            self._first = False
            self._compare(self._digests)  # what the ranks have begun with may have become equal only now, or differ
        self.session.progress("save")
        self._fire("step_end", numbers.step - 1)

    def callbacks_end(self, params: Any = None) -> None:
        """Behind all other callbacks: CheckpointMonitor may have saved."""
        if self.state is None:
            before = getattr(monitor_of(params.list_callback), "_append_step_num", 0) or 0
            self.manifests.step_end(int(before) + int(params.cur_step_num))
            return
        self.state.stop_if_taken(self._saves)
        self._seen = self.state.numbers.step
        self.manifests.step_end(self.state.numbers.step)
        self.state.others_end()
        self._marks.step_end()
        self.session.progress("data")

    def trained(self) -> None:
        """The last step is done."""
        if self._dataset is not None:
            self._dataset.set_init_step(0)  # whoever reads it next gets all of it
        if self.state is not None:
            self.state.stop_if_taken(self._saves)
            self.manifests.step_end(self.state.numbers.step, last=True)
            self.state.others_end()

    def others_begin(self) -> None:
        """The framework's own callbacks are next, and one of them may save: a gasp of the same name waits for them."""
        if self.state is not None and self._saves:
            self.state.others_begin()

    def _fire(self, phase: str, step: int) -> None:
        if self._faults is not None:
            self._faults.fire(phase, step)

    # -- end --------------------------------------------------------------------------------------

    def end_with(self, error: BaseException) -> None:
        """The loop raised: have the step saved. Returns when the exception shall go on as it is."""
        if self._ended or self.state is None:
            return
        if isinstance(error, Released):
            self._note_unseen()
            leave(error.outcome)
        self._ended = True
        self.state.others_end()
        verdict = verdict_of(error)
        if verdict is not None:  # what the update has made is worth nothing, and a restart would make it again
            log.error("%s", verdict)
            framework_verdict.give(verdict)
        if verdict is not None or is_success(error):
            self.close(goodbye=True)
            return
        if why := self.state.settle():
            self.session.status.broken = f"{cause_of(error)}: {why}"
        self._note_unseen()
        kind = kind_of(error)
        outcome = self.session.fault(kind, cause_of(error))
        if outcome.ending == "gave_up" and (why := advice(self.place.world_size)):
            log.error("%s", why)
        if kind == "peer" and self.place.world_size > 1:
            leave(outcome, cause_of(error))
        self.close(goodbye=False)

    def _note_unseen(self) -> None:
        assert self.state is not None
        step = self.state.numbers.step
        if step > self._seen:
            self.session.note(f"step {step} was cut short on rank {self.place.rank} after its update: callbacks that "
                              "did not see its end, and their logs, have nothing of it")  # fmt: skip

    def end_early(self, error: BaseException) -> None:
        """Something raised before or after the loop, or what `end_with` has seen goes on."""
        if isinstance(error, Released):
            leave(error.outcome)
        good = is_success(error) or self._left
        if not good:
            self.session.failed_to_start(error, kind_of(error))
        self.close(goodbye=good)

    def close(self, goodbye: bool) -> None:
        """Undo everything. Idempotent."""
        faults = [self._faults.undo] if self._faults is not None else []
        gate = [self.state.gate.undo] if self.state is not None and self.state.gate is not None else []
        aux = [self.state.aux.close] if self.state is not None else []
        run_all([*faults, *gate, lambda: self.session.close(goodbye), *aux])


def _made(options: Options) -> LastGasp:
    """A callback for a job whose user has written none."""
    callback = LastGasp.__new__(LastGasp)
    super(LastGasp, callback).__init__()
    callback.options, callback.run = options, None
    return callback


def _is_mindformers(callbacks: list[Any]) -> bool:
    """MindFormers loads and skips data itself, and its own trainer was called with what the chooser decided."""
    return any(type(callback).__module__.startswith("mindformers.") for callback in callbacks)


def _epoch(params: Any, done: int) -> int:
    return max(1, -(-done // int(params.batch_num)))


def _loss_scale(outputs: Any) -> float | None:
    """The third output of a train network with loss scaling, as CheckpointMonitor takes it (mindformers.md §5).

    The network of a user may tell something else there.
    """
    if not isinstance(outputs, tuple | list) or len(outputs) < 3:
        return None
    value = outputs[2]
    try:
        return float(value.asnumpy()) if hasattr(value, "asnumpy") else float(value)
    except (TypeError, ValueError):
        return None


def _faults(rank: int) -> Any:
    """The faults that `LASTGASP_FAULT` asks for; None where it asks for none."""
    if not os.environ.get(faults.ENV_FAULT, "").strip():
        return None
    if importlib.util.find_spec("lastgasp_mindformers.testing") is None:
        return None
    from lastgasp_mindformers.testing import LoopFaults

    return LoopFaults(rank)
