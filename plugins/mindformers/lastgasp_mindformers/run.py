"""What belongs to one training: session, state, selector, manifests; its beginning and its end."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import mindspore

from lastgasp.adapter import AdapterRun, Digests, Framework, Layout, ManifestWriter, Options, Released, is_success
from lastgasp.adapter.mindspore import FORMAT, ITERATIONS, LEGACY, PLAIN
from lastgasp_mindformers import begun, later, topology
from lastgasp_mindformers.aux_state import AuxRecorder, Numbers, decode, reported_scale, restore_random
from lastgasp_mindformers.callback import Boundary, LastGasp, Later, made
from lastgasp_mindformers.data import UNSEEDED, changed, described, steps_of_epoch
from lastgasp_mindformers.digests import digests_of, unknown_yet
from lastgasp_mindformers.draws import repeated
from lastgasp_mindformers.exits import cause_of, is_to_be_repeated, kind_of, verdict_of
from lastgasp_mindformers.gate import gate_of
from lastgasp_mindformers.keeping import Keeping
from lastgasp_mindformers.left_files import LeftFiles
from lastgasp_mindformers.manifests import Manifests
from lastgasp_mindformers.marks import LoopMarks
from lastgasp_mindformers.monitors import forgetful, is_monitor, searched
from lastgasp_mindformers.native import Iterations, monitor_of, native_of
from lastgasp_mindformers.plain import fewer, load, not_repeated
from lastgasp_mindformers.ranks import connect, dated, device, place_of, rank_and_size, versions
from lastgasp_mindformers.reload import MindFormersSelector
from lastgasp_mindformers.settings import answered_by
from lastgasp_mindformers.source import MindSporeSource, Writer
from lastgasp_mindformers.state import MindSporeState
from lastgasp_mindformers.testing import LoopFaults
from lastgasp_mindformers.unused import UNUSED

log = logging.getLogger("lastgasp")

_home: Path | None = None
"""Where a training of this process was protected. Another one would resume from the first one's checkpoints."""
ONLY_FIRST = "this process has trained before: lastgasp protects only its first training. "
ONE_CALL = "A script that trains epoch by epoch is protected when it calls model.train(E, ...) once, for all epochs"
OWN_DIRECTORY = (
    "If this one saves iteration_* directories, give it one of its own: the next start would take them for the first's"
)
_NOT_RESUMED = (
    "outside of MindFormers' Trainer lastgasp resumes no training with a CheckpointMonitor. Load in the script and "
    "give CheckpointMonitor its append_info, or use MindSpore's ModelCheckpoint"
)


def trained_before() -> bool:
    """Whether a training of this process was protected: the only one that is, and that resumes."""
    return _home is not None


def begins(directory: Path) -> None:
    """One is protected, with this directory."""
    global _home
    _home = directory


def unprotected(callbacks: list[Any]) -> list[Any]:
    """Those of a further training: a LastGasp of the first one belongs to a session that is closed."""
    others, home = [callback for callback in callbacks if not isinstance(callback, LastGasp)], _home
    if home is None or rank_and_size()[0] != 0:
        return others
    return [*others, Later(lambda saving: later.record(home, saving))]


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
        self.place = place = place_of(topology.replicas_of(rank_and_size()[1]))
        framework = Framework(
            name=" ".join(f"{name} {version}" for name, version in versions().items()),
            kind_of=kind_of,
            verdict_of=verdict_of,  # the update's result is worthless, and a restart would repeat it
            device=place.rank,
            versions=versions(),
        )
        self.life = AdapterRun(
            framework, options.gasp, options.marks, place, connect(place), backend=topology.embedded_backend()
        )
        self.session = self.life.session
        self.place = place = dated(place, self.session.started_s)
        self.selector = MindFormersSelector(options, place, self.session.gather, self.session.note)
        self.manifests = Manifests(
            ManifestWriter(FORMAT, place, sha256=options.gasp.sha256),
            self.life.gather_saved,
            self.session.status,
            aux=self.life.source.capture,
            finished=lambda: begun.finished(options.gasp.directory),
        )
        self.state: MindSporeState | None = None
        self._marks = LoopMarks(self.session)
        self._faults = LoopFaults(place.rank)
        self.life.on_close(self._faults.undo)
        self._left_files = LeftFiles()
        self._aux = b""
        self._seen = self._epochs = self._size = self._total = 0
        self._dataset: Any = None
        self._ended = self._saves = self._first = self._left = self._again = False
        self._unseen = ""
        self.session.register(device(), versions())
        self.session.status.recovery = answered_by(options.recovery, place.rank)

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
        given = list(arguments["callbacks"])
        if trained_before():
            self._left = True
            log.warning(ONLY_FIRST + (ONE_CALL if monitor_of(given) is None else OWN_DIRECTORY))
            return arguments | {"callbacks": unprotected(given)}
        begins(self.options.gasp.directory)
        ours = next((callback for callback in given if isinstance(callback, LastGasp)), None) or made(self.options)
        others = [callback for callback in given if callback is not ours]
        arguments = arguments | {"callbacks": [Boundary(self), *others, ours]}
        ours.run = self
        if topology.left_to_mindspore():
            self._left = True
            log.warning("MS_ENABLE_TFT: saving after a fault is left to TrainFaultTolerance")
            return arguments
        network = model.train_network
        self._native = native_of(network, others, self.options.gasp.directory, self.place.world_size)
        if self.selector.steered:
            self._aux = self.selector.aux
        elif monitor_of(others) is not None:
            self._tell_of_what_is_not_loaded()
        else:
            self._dataset = arguments["train_dataset"]
            own_count = arguments.get("initial_epoch")
            arguments, self._aux = load(self.selector, network, arguments, self._searched(others))
            self._total = int(arguments["epoch"])
            if self._aux and (why := fewer(saved := decode(self._aux).epochs, self._total)):
                log.error("%s", why)
                self.session.note(why)
                self._total = saved
            if own_count:
                self._epochs = int(arguments["initial_epoch"])
                self._size = steps_of_epoch(arguments, mindspore.get_context("device_target"))
            if self.selector.resumed:
                for why in not_repeated(self._dataset, self.selector.resumed):
                    self.session.note(why)
            elif self.place.rank == 0 and UNSEEDED in not_repeated(self._dataset, 1):
                log.warning("%s", UNSEEDED)
        self._bind(network)
        if int(arguments.get("initial_epoch") or 0) >= int(arguments["epoch"]):
            log.warning("all %s epochs are trained: there is nothing left to do", arguments["epoch"])
            self._give_data_back()
            return None
        self.life.on_close(self._give_data_back)
        return arguments

    def _give_data_back(self) -> None:
        """The loop has its iterator, or will have none: any other reader gets all of the data."""
        if self._dataset is not None:
            self._dataset.set_init_step(0)
            self._dataset = None

    def _searched(self, callbacks: list[Any]) -> list[tuple[Path, Layout]]:
        """Where checkpoints of a plain training may be: LastGasp's directory, and those of ModelCheckpoint."""
        home = self.options.gasp.directory.absolute()
        found, self.selector.apart = searched(callbacks, self.place.rank, self.session.gather)
        own: list[tuple[Path, Layout]] = [(home, LEGACY)]
        if not any(folder == home for folder, _ in found):
            own.append((home, PLAIN))
        return [*own, *found]

    def _tell_of_what_is_not_loaded(self) -> None:
        """CheckpointMonitor without MindFormers' Trainer: its count begins where the script says, or at 0."""
        layout = ITERATIONS if isinstance(self._native, Iterations) else LEGACY
        if not self._native.completed_before and (there := list(layout.discover(self._native.directory))):
            where = f"{len(there)} checkpoints in {self._native.directory}"
            log.error("%s", said := f"training begins from scratch beside {where}: {_NOT_RESUMED}")
            self.session.note(said)

    def _bind(self, network: Any) -> None:
        readable = mindspore.get_context("device_target") == "CPU"
        self._hold(network, self._native, readable=readable)
        self._network = network
        if self.place.rank == 0:
            level = logging.WARNING if self.advice() else logging.INFO
            log.log(level, "%s", topology.protection(self.place.world_size, self._keeping.on))

    def _hold(self, network: Any, writer: Writer, *, readable: bool = True) -> None:
        """Bind the state and its writer."""
        session, gate, recorder = self.session, gate_of(network), AuxRecorder(network)
        self.life.on_close(recorder.close, last=True)
        if gate is not None:
            self.life.on_close(gate.undo)
        self.state = MindSporeState(
            gate,
            recorder,
            session.status,
            before_update=session.before_update,
            step_completed=lambda step: session.step_completed(step),  # looked up anew: the first one is another method
            finish=session.config.finish_timeout,
            readable=readable,
        )
        self.source = MindSporeSource(self.state, writer, self.manifests.writer, session.config, session.note)
        self.source.present, self.source.in_order = self.selector.present, self.selector.in_order
        self._keeping = Keeping(self.source, self.options.arena, session)
        self.state.keep = self._keeping.fill
        self.life.on_close(self._keeping.close, last=True)
        self.life.bind(self)

    def others_load(self, params: Any, *, evaluation: bool = False) -> None:
        """Before the other callbacks where training or evaluation begins: one may load over what was resumed from."""
        if self.selector.resumed is not None:
            for what in self._left_files.hide(params.list_callback, self.selector.resumed, evaluation=evaluation):
                self.session.note(what)

    def others_loaded(self) -> None:
        """Behind them."""
        self._left_files.show()

    def begin(self, params: Any) -> None:
        """Training starts, or resumes from what was loaded."""
        self.manifests.bind(params.list_callback)
        self._marks.begin(params.list_callback)
        if self.state is None:
            self.session.defer_to_framework()
            return
        self.state.aux.data = data = described(params)
        self.state.aux.epochs = self._total
        if self._aux:
            aux = decode(self._aux)
            restore_random(aux)
            self.state.aux.restore_scaling(aux)
            if why := changed(aux.data, data):
                self.session.note(why)
        done = self._native.completed_before or int(self.selector.resumed or 0)
        if monitor_of(params.list_callback) is None:
            params.cur_step_num = done  # MindSpore would count from 0 again, and so would all other callbacks
        for why in filter(None, (forgetful(params.list_callback), repeated(self._network)) if done else ()):
            self.session.note(why)
        self._offset = done - int(params.cur_step_num)
        self._saves = any(is_monitor(callback) for callback in params.list_callback)
        within = (done - 1) % int(params.batch_num) + 1 if done else 0  # as CheckpointMonitor names that step
        self._again = 0 < within < int(params.batch_num)
        epoch = _epoch(params, done)
        if self._epochs:  # the user has begun at a later one; these are over, and `batch_num` may be a `sink_size`
            epoch = self._epochs + (not done or done % self._size != 0)
        self.state.begin(Numbers(step=done, epoch=epoch, within=within))
        self._seen = done
        self._first = True
        self._start(done)

    def _start(self, done: int) -> None:
        self.life.begin(done, durable=done if done and done == self.selector.resumed else 0, device=device())
        self._regrouped()

    def digests(self) -> Digests:
        """Of what all ranks should hold; not before the first step where MindSpore broadcasts in it."""
        return unknown_yet() if self._first and topology.is_broadcast() else self._digests()

    def _digests(self) -> Digests:
        assert self.state is not None
        return digests_of(self._network, self.state.aux.names)

    def _regrouped(self) -> None:
        """Record which ranks hold the same, as compared: a parallel mode is no proof."""
        place = replace(self.session.place, since_ns=self.place.since_ns)
        self.place = self.manifests.writer.place = place

    # -- steps ------------------------------------------------------------------------------------

    def _numbers(self, params: Any, outputs: Any = None) -> Numbers:
        """Of the step under way, as CheckpointMonitor counts: `cur_step_num` already says it."""
        current = int(params.cur_step_num)
        within = (current - 1) % int(params.batch_num) + 1
        return Numbers(self._offset + current, int(params.cur_epoch_num), within, reported_scale(outputs))

    def step_begin(self, params: Any) -> None:
        """After all other callbacks, before the graph.

        Raises:
            Released: a recovery took place.
        """
        self._give_data_back()
        if self.state is None:
            return
        coming = self._numbers(params)
        self._fire("data", coming.step - 1)
        self._marks.step_begin(coming.step)
        self.state.frozen.step_begin()
        self.state.step_begin(coming)
        self.session.progress(
            "backward"
        )  # the graph waits for the other ranks: a rank that is elsewhere is to blame for a hang
        self._fire("forward", coming.step - 1)

    def step_end(self, params: Any) -> None:
        """Before all other callbacks. Raises Released where a gasp has begun meanwhile."""
        if self.state is None:
            return
        numbers = self._numbers(params, params.net_outputs)
        self._fire("after_update", numbers.step - 1)
        self.state.step_end(numbers, saves=self._saves)
        for told in self.state.frozen.step_end():
            self.session.note(told)
        if self._first:
            self._first = False
            self.session.compare_replicas(self._digests)
            self._regrouped()  # only now may ranks that began with different states be equal, or differ
        self.session.progress("save")
        self._fire("step_end", numbers.step - 1)

    def callbacks_end(self, params: Any = None) -> None:
        """After all other callbacks: CheckpointMonitor may have saved."""
        if self.state is None:
            before = getattr(monitor_of(params.list_callback), "_append_step_num", 0) or 0
            self.manifests.step_end(int(before) + int(params.cur_step_num))
            return
        self.state.stop_if_taken(self._saves)
        self.state.capture_again()
        numbers = self.state.numbers
        self._keeping.look(numbers.step)
        self._seen = numbers.step
        if params is not None and numbers.within == int(params.batch_num):
            self._unseen = f"epoch {numbers.epoch} was cut short on rank {self.place.rank} after its last step"
        self.saved(numbers.step)
        self.state.others_end()
        self._marks.step_end()
        self.session.progress("data")

    def saved(self, step: int) -> None:
        """The framework may have saved this step: a manifest for it."""
        self.manifests.step_end(step)

    def epoch_begin(self) -> None:
        """After all other callbacks: where training resumes inside of an epoch, it had begun before."""
        if self.state is None or not self._again:
            return
        self._again = False
        if names := self.state.aux.put_back(self.state.numbers.step):
            self.session.note(
                f"callbacks saw the epoch begin again behind the resume and changed {', '.join(names[:3])}"
                f"{' and others' * (len(names) > 3)}: kept as saved, since that epoch had begun before the fault"
            )

    def epoch_end(self) -> None:
        """After all other callbacks."""
        if self.state is not None:
            self.state.capture_again()
            self._unseen = ""

    def evaluates(self) -> None:
        """An evaluation has come to its next batch: all of them may take longer than a job may go without progress."""
        if self.state is not None:
            self.session.progress("validation")

    def evaluated(self) -> None:
        """It is over, and the next step is due."""
        if self.state is not None:
            self.session.progress("data")

    def trained(self) -> None:
        """The last step is done."""
        if self.state is not None:
            self.state.stop_if_taken(self._saves)
            self.manifests.step_end(self.state.numbers.step, last=True)
            self.state.others_end()

    def others_begin(self) -> None:
        """The framework's own callbacks are next, and one of them may save: a gasp of the same name waits for them."""
        if self.state is not None and self._saves:
            self.state.others_begin()

    def _fire(self, phase: str, step: int) -> None:
        self._faults.fire(phase, step)

    # -- end --------------------------------------------------------------------------------------

    def end_with(self, error: BaseException) -> None:
        """The loop raised: have the step saved. Returns when the exception is to propagate unchanged."""
        if self._ended or self.state is None:
            return
        self._ended = True
        self.state.others_end()
        if self.state.numbers.step > self._seen:
            self._marks.step_end()  # it is saved, so the next attempt does not mark it
        if is_to_be_repeated(error):
            self.state.reject()
        if is_to_be_repeated(error) or verdict_of(error) is not None:
            self._keeping.forget()
            self.session.condemn(cause_of(error))  # the others may not have seen it yet, or not at all
        self.life.failed(error)

    def end_early(self, error: BaseException) -> None:
        """Something raised before or after the loop, or what `end_with` has seen propagates."""
        if (self.life.begun or self._left or self._ended) and not isinstance(error, Released):
            self.close(goodbye=is_success(error) or self._left)
        else:
            self.life.failed(error)

    def settle(self, cause: str) -> str:
        """Why the state is not that of a complete step; empty where it is."""
        assert self.state is not None
        why = self.state.settle()
        self.before_exit()  # its callbacks do not see that end either
        return why

    def before_exit(self) -> None:
        """Note what callbacks did not see."""
        unseen = self._unseen
        if self.state is not None and (step := self.state.numbers.step) > self._seen:
            unseen = f"step {step} was cut short on rank {self.place.rank} after its update"
        if unseen:
            self.session.note(f"{unseen}: callbacks that did not see its end, and their logs, have nothing of it")

    def advice(self) -> str:
        """About sharded parameters."""
        return topology.advice(self.place.world_size, self._keeping.on)

    def close(self, goodbye: bool) -> None:
        """Undo everything. Idempotent."""
        self.life.close(completed=goodbye)


def _epoch(params: Any, done: int) -> int:
    return max(1, -(-done // int(params.batch_num)))
