"""Recovery in place: `fit` is entered again in the same `trainer.fit` call (docs/in-place.md).

A process that survives a fault goes through the whole of Lightning's `fit` again, as a new process does: from the
process group to the first batch. So all ranks meet in the same collectives, and what a user's hooks build is built
again. What is different from a restart is where the state comes from: memory instead of a file.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BaseFinetuning, BatchSizeFinder, Checkpoint, LearningRateFinder
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader

from lastgasp.adapter import Contact, Place, choose_backend, launched, recovery_here
from lastgasp.adapter.again import (
    INCARNATION,
    NEW,
    Again,
    AgainHere,
    Entry,
    Recovery,
    Renewed,
    UserValues,
    bytes_of,
    current,
    enter,
    fill,
    in_progress,
    packed,
)
from lastgasp.adapter.checkpoint import name_of_fit
from lastgasp_lightning import fsdp
from lastgasp_lightning.checkpoint_io import LAYOUT
from lastgasp_lightning.compat import Undo, replace_method
from lastgasp_lightning.enters import Enters
from lastgasp_lightning.kept import KeptTrainer
from lastgasp_lightning.logversions import leave
from lastgasp_lightning.metrics import is_own, is_summed
from lastgasp_lightning.metrics_again import LOST_OBJECTS, accumulated
from lastgasp_lightning.ranks import connect_nodes, is_sharded_by
from lastgasp_lightning.resume import LOST, LOST_ALONE, extra_of, logged
from lastgasp_lightning.state import KEY
from lastgasp_lightning.tuner import is_smoke_test
from lastgasp_lightning.unsharded import cannot_shard_again
from lastgasp_lightning.uservalues import ValuesOfSteps, roots_of

log = logging.getLogger("lastgasp")

IN_PLACE: tuple[Recovery, ...] = ("auto", "retry", "replace")
"""Values of `recovery` with which a fit may be entered again."""


def watch_fits(asked: Recovery | None) -> None:
    """From now on a `fit` of a trainer with a LastGasp may be entered again, unless `asked` rules it out. Idempotent.

    Which callbacks a trainer has is known when `fit` begins, and a callback is first called within it.
    """
    original = Trainer._fit_impl
    if asked in ("restart", "save") or hasattr(original, "_lastgasp"):
        return
    _watch_groups()

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        if in_progress() or is_smoke_test(self):
            return original(self, *args, **kwargs)
        found = [one for one in self.callbacks if isinstance(one, Enters)]
        for one in found:
            one.recovery, one.looked_at = recovery_for(self, one.asked), True
        wanted = [one for one in found if one.recovery in IN_PLACE]
        if not wanted:
            return original(self, *args, **kwargs)
        model = args[0] if args else kwargs["model"]
        if why := cannot(self, model):
            tell(why, any(one.asked for one in wanted))
            return original(self, *args, **kwargs)
        kept = KeptTrainer(self, model)

        def entered() -> Any:
            entry = current()
            assert entry is not None
            entry.objects = kept
            if entry.held is not None:
                _done_before(self.callbacks)
            return original(self, *args, **kwargs)

        first, auto = not dist.is_initialized(), all(one.recovery == "auto" for one in wanted)
        fewer = may_have_fewer(self, *args[1:2], **kwargs)
        return enter(entered, "", first=first, joins=first and auto, fewer=fewer)

    fit._lastgasp = True  # type: ignore[attr-defined]
    Trainer._fit_impl = fit  # type: ignore[method-assign]


def recovery_for(trainer: Any, asked: Recovery | None) -> Recovery:
    """What `recovery` is for a fit of this trainer.

    Raises:
        ConfigError: see `recovery_here`.
    """
    strategy = trainer.strategy
    if asked is not None or not (type(strategy) is DDPStrategy or is_sharded_by(strategy)):
        return asked or "restart"
    return recovery_here(None, strategy.root_device.type, strategy._get_process_group_backend())


def may_have_fewer(trainer: Any, train_dataloaders: Any = None, **others: Any) -> bool:
    """Whether a fit of this trainer may turn out to have an `ElasticLoader`, as far as its arguments tell."""
    return type(trainer.strategy) is DDPStrategy and not isinstance(train_dataloaders, DataLoader)


def _done_before(callbacks: list[Any]) -> None:
    """A fit is entered again, and its config was saved: LightningCLI's callback meets other ranks in its first `setup`.

    A new process would wait there for those that do not come, or refuse the file that is there.
    """
    cli: Any = sys.modules.get("lightning.pytorch.cli")
    for one in callbacks:
        if cli is not None and isinstance(one, cli.SaveConfigCallback):
            one.already_saved = True


def _watch_groups() -> None:
    """Know the process groups that strategies of Lightning's make: an entry makes them again."""
    for strategy, name in ((DDPStrategy, "setup_distributed"), (ModelParallelStrategy, "_setup_distributed"),
                           (FSDPStrategy, "setup_environment")):  # fmt: skip
        setattr(strategy, name, _watched(getattr(strategy, name)))
    _count_ranks()


TOO_FEW = (". A host may be missing: lastgasp goes on with fewer ranks, but a start or restart of a Trainer needs all. "
           "Give lastgasp run --min-ranks and --nnodes {}, not MIN:MAX: then a restart waits for the host")  # fmt: skip


def _count_ranks() -> None:
    """The ranks that there are may be fewer than those of all devices that the script has asked for."""
    complete: Any = DDPStrategy.distributed_sampler_kwargs
    DDPStrategy.distributed_sampler_kwargs = property(  # type: ignore[method-assign, assignment]
        lambda self: {**complete.fget(self), "num_replicas": self.world_size}
    )
    original = TorchElasticEnvironment.validate_settings

    def validate_settings(self: Any, num_devices: int, num_nodes: int) -> None:
        if os.environ.get(INCARNATION):
            return
        try:
            original(self, num_devices, num_nodes)
        except ValueError as error:
            fewer = self.world_size() < num_devices * num_nodes and launched()
            raise ValueError(f"{error}{TOO_FEW.format(num_nodes) * fewer}") from None

    TorchElasticEnvironment.validate_settings = validate_settings  # type: ignore[method-assign]


def _watched(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def setup_distributed(self: Any) -> None:
        before = dist.is_initialized()
        original(self)
        if not before and dist.is_initialized():
            _made[:] = [weakref.ref(dist.group.WORLD)]

    return setup_distributed


_made: list[Any] = []
"""The newest of them."""


def _users_group() -> bool:
    """Whether a process group is there that an entry would not make again."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    all_groups: Any = getattr(getattr(distributed_c10d, "_world", None), "pg_map", ())
    return len(all_groups) > 1 or not _made or _made[0]() is not dist.group.WORLD


def tell(why: str, asked: bool) -> None:
    """One line of rank 0: a warning where the user has `asked` for it."""
    if os.environ.get("RANK", "0") == "0":
        level = logging.WARNING if asked else logging.INFO
        log.log(level, "this fit cannot be entered again: %s. After a fault the job restarts", why)


def cannot(trainer: Any, model: Any) -> str:
    """Why a fit of this trainer cannot be entered again; empty if it can."""
    strategy, epoch = trainer.strategy, getattr(trainer.fit_loop, "epoch_loop", None)
    if is_sharded_by(strategy):
        if why := cannot_shard_again(model) or fsdp.cannot_again(strategy):
            return why
    elif type(strategy) is not DDPStrategy or strategy._start_method != "popen":
        return (f"its strategy is {type(strategy).__name__}, and only 'ddp', ModelParallelStrategy and FSDPStrategy "
                "can make their process group anew")  # fmt: skip
    if not launched() and choose_backend().backend == "embedded":
        return "no launcher of lastgasp's has started it (lastgasp run, or torchrun where lastgasp is installed)"
    if _users_group():
        return "a process group was there before that the script itself has made"
    if threading.current_thread() is not threading.main_thread():
        return "it is not called on the main thread, where signals arrive"
    if type(trainer.fit_loop) is not _FitLoop or type(epoch) is not _TrainingEpochLoop:
        return "its loops are not Lightning's own"
    if type(trainer.profiler) not in (PassThroughProfiler, SimpleProfiler):  # others hold on to what they measure
        return f"a profiler is on ({type(trainer.profiler).__name__})"
    finders = [type(one).__name__ for one in trainer.callbacks if isinstance(one, LearningRateFinder | BatchSizeFinder)]
    return f"{finders[0]} tunes inside of it" if finders else ""


def entry_of(trainer: Any) -> Entry | None:
    """The fit of this trainer that may be entered again, if it is one."""
    entry = current()
    kept = entry.objects if entry is not None else None
    return entry if isinstance(kept, KeptTrainer) and kept.trainer is trainer else None


_MODULES = ("a rank that takes another one's place begins with the script's modules in {}, which training has changed: "
            "only those that are part of the LightningModule are handed over")  # fmt: skip
_BUFFERS = (
    "training changes buffers that do not persist (register_buffer(..., persistent=False)): {}. A rank that takes "
    "another one's place begins with the script's, from which DDP gives those of rank 0 to all, and one that stays may "
    "have the repeated step twice. Have them persist"
)
_SETTINGS = "a rank that takes another one's place begins with the script's settings, which training has changed: {}"


class LightningAgain(AgainHere):
    """What a `LightningRun` keeps for the next entry, and begins with."""

    layout = LAYOUT
    values_of = 1
    """Of how many steps plain values are kept."""
    _names: frozenset[str] | None = None
    _trained: frozenset[str] = frozenset()
    _kept: UserValues | None = None
    steps: ValuesOfSteps | None = None

    def restores(self, selector: Any) -> None:
        """The fit was entered again: have it begin with what was held, instead of any file."""
        selector.memory = self.received

    def begun(self) -> None:
        """A new process would have these parameters."""
        run, entry = self.run, self.run.entry
        self._names, self._trained = names_of(run.trainer), trained(run.trainer)
        if entry is not None and not entry.why and entry.sessions == 1:
            self.steps = ValuesOfSteps(run.trainer, self.values_of)
        sharded = is_sharded_by(run.trainer.strategy)
        run.state.values = self.steps if self.steps is not None or sharded else ValuesOfSteps(run.trainer, 1)

    def elastic(self) -> bool:
        """Its `ElasticLoader` has the micro-batches of missing ranks done."""
        return self.run.elastic.loader is not None

    def ready(self) -> None:
        """As in the base; the incident gets the digest of all samples that were used before it."""
        loader, enters = self.run.elastic.loader, self.enters
        super().ready()
        if loader is not None and enters and self.run.place.rank == 0:
            self.run.session.note(loader.told)

    def renumbered(self, checkpoint: dict[str, Any], again: Again) -> dict[str, Any]:
        """As in the base; with what no rank has any more of what each has had alone."""
        if again.members:
            record = checkpoint[KEY]
            gone = {rank: aux for rank, aux in record["small"].items() if rank not in again.members}
            first = record["small"].get(0)
            record["left"] = {
                "logged": logged(checkpoint),
                "first": extra_of(first)[1:] if first is not None else (),
                "gone": [extra_of(aux)[1:] for aux in gone.values()],
            }
            record["results_rank"] = again.numbers.get(record["results_rank"], NEW)
            left = again.rung == "shrink" and set(range(record["world_size"])).difference(again.members, gone)
            if left and any(map(is_summed, record["results"])):
                self.run.session.note(LOST.format(", ".join(map(str, sorted(left)))))
            if left and first is not None and accumulated(extra_of(first).objects):
                self.run.session.note(LOST_OBJECTS.format(", ".join(map(str, sorted(left)))))
            if left and first is None and any(is_own(row) for row in record["results"]):
                self.run.session.note(LOST_ALONE)
        return super().renumbered(checkpoint, again)

    def changed(self) -> str:
        """Parameters have other names or number (ModelPruning), data or plain values cannot be those of the step."""
        trainer, values = self.run.trainer, self.steps
        other = sorted(names_of(trainer) ^ self._names) if self._names is not None else []
        if other:
            return f"the module has other parameters than when training began: {', '.join(other[:3])}"
        if any(isinstance(one, BaseFinetuning) for one in trainer.callbacks) and trained(trainer) != self._trained:
            return "BaseFinetuning has unfrozen layers since training began, which DDP made anew would average"
        if given := [one for one in self.run.state.position.loaders if isinstance(one, Iterator)]:
            return f"its training data come from a {type(given[0]).__name__}, which cannot begin again"
        return values.cannot() if values is not None else ""

    def before_dump(self, step: int) -> None:
        """Plain values of this step are put back first, so that `state_dict` methods have them."""
        self.run.note_lost()
        if names := self.run.unsaved.buffers() if self.run.unsaved is not None else []:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            self.run.session.note(_BUFFERS.format(", ".join(names[:4]) + more))
        values = self.steps
        found = values.of(step) if values is not None else None
        if found is not None:
            found.put_back()
            self._kept = found

    def values(self, gives: bool = True) -> bytes:
        """Those of this rank."""
        kept, unsaved = self._kept, self.run.unsaved
        if unsaved is not None and gives:
            for text, names in ((_MODULES, unsaved.modules()), (_SETTINGS, unsaved.settings())):
                if names:
                    self.run.session.note(text.format(", ".join(names)))
        try:
            return packed(kept.roots, kept.left_out, self.run.carried.places) if kept is not None else b""
        except Exception as error:  # an object of the user's that cannot be pickled
            level = logging.WARNING if gives else logging.DEBUG
            log.log(level, "values of the module and of callbacks cannot be handed over: %s", error)
            return b""

    def state(self) -> UserValues | None:
        """Plain values, which `put_back` gives back once more when hooks have run.

        Of the entry that is over they hold neither its optimizers nor sharded parameters: there may be no room for two.
        """
        if self._kept is not None:
            self._kept.let_go()
        return self._kept

    def put_back(self) -> None:
        """The fit was entered again, and stands on its boundary: plain values are those that were there."""
        run, memory = self.run, self._memory
        if run.entry is None or memory is None:
            return
        kept, run.entry.objects.values = run.entry.objects.values, None
        if kept is not None:
            kept.put_back(True, run.carried.before, run.carried.places)
            note = kept.note()
        elif memory.values:
            named = fill(roots_of(run.trainer), memory.values, run.carried.places)
            more = f" and {len(named) - 3} more" if len(named) > 3 else ""
            note = f"rank {run.place.rank} has another rank's values: {', '.join(named[:3])}{more}" if named else ""
        else:
            note = f"what the module and callbacks of rank {run.place.rank} kept beside their state is lost"
        if note:
            run.session.note(note)

    def durable(self, step: int) -> int:
        """As in the base; and where training begins with what was left in arenas."""
        shards = self.run.shards
        return super().durable(step) if shards is None or shards.durable is None else int(shards.durable)

    def objects(self) -> Renewed:
        """Kept since before the first entry."""
        found: Renewed = self.run.entry.objects
        return found

    def target(self) -> Callable[[int], Path]:
        """As of any gasp of this fit."""
        directory, number = self.run.config.directory, self.run.fit.number()
        return lambda step: gasp_path(directory, step, number)

    def reach(self) -> Callable[[Place], Contact | None]:
        """Its launcher's controller."""
        return functools.partial(connect_nodes, self.run.trainer.num_nodes)

    def nbytes(self) -> int:
        """Of the module, its averages and the optimizers' states."""
        trainer = self.run.trainer
        averages = [getattr(callback, "_average_model", None) for callback in trainer.callbacks]
        return bytes_of([trainer.lightning_module, *(one for one in averages if one is not None)], trainer.optimizers)

    def let_go(self, again: Again) -> list[Any]:
        """Leave the wrapper of Lightning's strategy, and the loggers' files where another rank may log from now on."""
        rank = self.run.place.rank
        if again.members and again.numbers.get(rank) != rank:
            leave(self.run.trainer.loggers)
        strategy = self.run.trainer.strategy
        wrapped, strategy.model = strategy.model, strategy.lightning_module
        return [wrapped] if wrapped is not strategy.model else []


def trained(trainer: Any) -> frozenset[str]:
    """Names of the parameters that are."""
    return frozenset(name for name, is_trained in fsdp.parameters_of(trainer) if is_trained)


def names_of(trainer: Any) -> frozenset[str]:
    """Of the module's parameters."""
    return frozenset(name for name, _ in fsdp.parameters_of(trainer))


def gasp_path(directory: Path, step: int, fit: int) -> Path:
    """Where the gasp of a step stands."""
    return directory / f"gasp-{name_of_fit(fit)}step={step:08d}.ckpt"


def keep_sigterm(trainer: Any) -> Undo:
    """A session takes SIGTERM already when Lightning installs its handlers: it keeps that one."""

    def make(register: Callable[[], None]) -> Callable[[], None]:
        def registered() -> None:
            ours = signal.getsignal(signal.SIGTERM)
            register()
            signal.signal(signal.SIGTERM, ours)

        return registered

    return replace_method(trainer._signal_connector, "register_signal_handlers", make)


def tell_others(trainer: Any, error: BaseException) -> None:
    """This process is about to exit because of `error`: tell the callbacks that hear of it before `LastGasp` else."""
    for callback in trainer.callbacks:
        if not isinstance(callback, Enters | Checkpoint):
            callback.on_exception(trainer, trainer.lightning_module, error)
