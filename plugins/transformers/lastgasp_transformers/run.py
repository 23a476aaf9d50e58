"""One call of `Trainer.train` under protection: what is chosen, hooked, and done at its end."""

from __future__ import annotations

import dataclasses
import logging
import signal
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import accelerate
import msgspec
import torch
import transformers
from torch.nn.parallel import DistributedDataParallel
from transformers import trainer as trainer_module

from lastgasp import adapter
from lastgasp.adapter import torch as shared
from lastgasp.adapter.again import Fewer
from lastgasp.adapter.checkpoint import Candidate, Fit
from lastgasp.adapter.testing import faults
from lastgasp.adapter.torch import rng
from lastgasp_transformers.beside import adapters_as_they_are, why_not_resumed
from lastgasp_transformers.exchanges import Exchanges
from lastgasp_transformers.fewer import fewer_of, settings_of
from lastgasp_transformers.files import FORMAT, LAYOUT, Policy, Record, load_beside, path_of, read_record
from lastgasp_transformers.loading import REREAD, Rereading, classes_allowed, draws_a_seed, reads_of, skip_nothing
from lastgasp_transformers.own import OwnSaves, call_save, gasps_in, remove_orphans_of, rotate, unless_a_gasp_is_written
from lastgasp_transformers.seats import Seats
from lastgasp_transformers.state import Training, dtypes_of, inner_of
from lastgasp_transformers.supported import NEEDS, require_supported
from lastgasp_transformers.values import CarriedValues

log = logging.getLogger("lastgasp")

_TRAINED: weakref.WeakKeyDictionary[Any, list[tuple[Path, int]]] = weakref.WeakKeyDictionary()
"""The fits that a Trainer has completed, by directory and number. A Trainer that is a data class has no hash."""


class Run:
    """One of them.

    Args:
        trainer: the Trainer.
        config, marks: what the user wants.
        offer: says how a fault may be answered; called before training begins.
        set_before: from what the script sets now, what it has set before it was entered for the first time.
    """

    def __init__(
        self,
        trainer: Any,
        config: adapter.GaspConfig,
        marks: adapter.MarksConfig,
        offer: Callable[[adapter.AdapterRun, Fewer], object] = lambda *_: None,
        set_before: Callable[[shared.AsSet], shared.AsSet] = lambda now: now,
    ) -> None:
        require_supported(trainer)
        self._trainer, self._own, self._offer, self._set_before = trainer, config.directory, offer, set_before
        data = shared.fingerprints.of_data([trainer.train_dataset])
        number = adapter.FITS.begin(self._own, trainer.model)
        self._fit = Fit(number=number, model=shared.fingerprints.of_model(trainer.model), data=data)
        if number:  # names of checkpoints contain the step alone
            config = dataclasses.replace(config, directory=self._own / f"fit-{number}")
        place = shared.place_of()
        versions = {module.__name__: module.__version__ for module in (transformers, accelerate, torch)}
        framework = adapter.Framework(name=f"transformers {transformers.__version__}", kind_of=shared.kind_of,
                                      versions=versions, device=shared.local(place)[0])  # fmt: skip
        self.core = core = adapter.AdapterRun(framework, config, marks, place, shared.connect(place))
        core.on_completed(lambda: adapter.FITS.end(self._own))
        trained = _TRAINED.setdefault(trainer.callback_handler, [])
        self._trained = [before for folder, before in reversed(trained) if folder == self._own]
        core.on_completed(lambda: trained.append((self._own, number)))
        self.session = core.session
        self._data = shared.PrefetchedData(rng.RngRecorder([trainer.args.device]))
        self._values = CarriedValues(trainer, place, self.session)
        self._record: Record | None = None
        self._reread: Rereading | Literal[""] | None = None
        self._good: set[Path] = set()
        self._loaded = ""
        self._before = 0.0
        self._loaders: list[object] = []
        self._as_set: shared.AsSet | None = None
        self._trial: Path | None = None
        self._seats: Seats | None = None
        self._exchanges = Exchanges()

    # -- start --------------------------------------------------------------------------------------------

    def train(self, call: Callable[[str | None], Any], wanted: bool = False) -> Any:
        """Choose what to resume from, and call `Trainer.train` with it.

        Args:
            wanted: the user has said that there is something (`resume_from_checkpoint=True`).
        """
        chosen, selector = self._choose(self._fit, wanted)
        for earlier in self._trained if wanted else ():
            if chosen is None:
                chosen, selector = self._choose(msgspec.structs.replace(self._fit, number=earlier), wanted)
                if chosen is not None and self.core.place.rank == 0:
                    log.warning("fit %d resumes from %s of fit %d, as resume_from_checkpoint=True asks",
                                self._fit.number, chosen.path, earlier)  # fmt: skip
        self._present = selector.present
        self._replace(self._trainer, "training_step", self._exchanges.micro_batch)
        self._seats = self._seats_now()
        self._gasps = self._known_gasps()
        for name in NEEDS:
            self._replace(self._trainer, name, getattr(self, f"_around{name if name[0] == '_' else '_' + name}"))
        return call(str(chosen.path) if chosen is not None else None)

    def _seats_now(self) -> Seats | None:
        """Where ranks of this attempt are missing since a recovery in place, by what was saved for it."""
        place, record = self.core.place, self._record or {}
        complete = record.get("world_size", 0) if place.incarnation and record.get("job", [""])[0] == place.job else 0
        if complete <= place.world_size:
            return None
        seats = Seats(self._trainer, place, complete, self._data, self.session)
        seats.complete_record(record)
        seats.install(self._replace)
        self._values.stands_for = seats.first.number, complete
        return seats

    def _known_gasps(self) -> set[int]:
        """As rank 0 sees them: where the best model is one, Trainer has ranks wait for each other, or none."""
        first = self.core.place.rank == 0
        found = sorted(gasps_in(Path(self._trainer.args.output_dir))) if first else []
        return set(msgspec.json.decode(self.session.gather("gasps", msgspec.json.encode(found))[0], type=list[int]))

    def _choose(self, fit: Fit, wanted: bool) -> tuple[Candidate | None, adapter.CheckpointSelector]:
        """Of what that training has saved."""
        config, place = self.core.config, self.core.place
        folders = dict.fromkeys([config.directory, self._own])
        policy = Policy(config, place, [*folders], LAYOUT, fit=fit, note=self.session.note)
        policy.wanted = wanted
        selector = adapter.CheckpointSelector(policy, self.session.gather, shared.is_about_content)
        chosen = selector.load(self._load)
        if chosen is not None and policy.several and not selector.named and fit is self._fit:
            self._trial = chosen.path
        return chosen, selector

    def _replace(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Have `around` called in place of a method, with the method first."""
        self.core.on_close(adapter.replace_attribute(owner, name, lambda original: partial(around, original)))

    def _load(self, candidate: Candidate) -> None:
        """Have Trainer load the model, so that another checkpoint can follow where this one does not fit."""
        self._record = read_record(candidate.path)
        if self._trainer.model_init is None:
            self._load_weights(self._trainer._load_from_checkpoint, str(candidate.path))
            self._loaded = str(candidate.path)
        self._good.add(candidate.path.resolve())

    def begin(self) -> None:
        """Everything is loaded, and training begins."""
        trainer, core, session = self._trainer, self.core, self.session
        if trainer.callback_handler.train_dataloader not in self._loaders[:1]:  # the script had asked for one first
            self._follow(trainer.callback_handler.train_dataloader)
        self.training = training = Training(
            trainer, self._data, core.place, session, self._fit.number, self._values
        )  # fmt: skip
        training.state.as_set = self._set_before(self._as_set or training.state.as_set)  # before one was loaded
        training.loaders, training.seats = self._loaders, self._seats
        if self._seats is not None:
            self._seats.agree(settings_of(trainer, self._loaders[0]))
        core.on_close(training.recorder.close, last=True)
        core.on_close(training.close)
        writer = adapter.ManifestWriter(FORMAT, core.place, lambda: self._fit, core.config.sha256)
        training.gasps = source = shared.GaspSource(
            training.write, partial(path_of, core.config.directory), LAYOUT,
            recorder=training.recorder, writer=writer, config=core.config, alike=lambda: core.alike,
        )  # fmt: skip
        source.present, source.carried = self._present, self._values.written
        self._saves = OwnSaves(writer, core, training.record_beside)
        self.marks = marks = shared.LoopMarks(training.state, session, training.step + 1, lambda: None)
        core.on_close(marks.close)
        self._data.fetching, self._data.fetched = self._fetching, marks.fetched
        self._data.inexact = lambda why: session.note(f"the data may not be those that were due: {why}")
        self.state: shared.TorchState = training.state
        self.rank = core.place.rank
        core.on_close(shared.install_faults(self))
        self._replace(trainer.accelerator, "backward", self._around_backward)
        if isinstance(trainer.model_wrapped, DistributedDataParallel):
            self._replace(trainer.model_wrapped, "_pre_forward", self._exchanges.by_ddp)
        self._exchanges.found = self._exchanged if self._seats is None else self._seats.exchanged
        self._replicas = shared.watch_replicas(training.state, core)
        core.bind(training)
        users = signal.getsignal(signal.SIGTERM)
        self._offer(core, fewer_of(trainer, self._loaders[0], self._data, training.state))
        core.begin(training.step, training.step, users_handler=users if callable(users) else None,
                   device=str(trainer.args.device))  # fmt: skip
        if (why := why_not_resumed(trainer.model)) and self.rank == 0:
            session.note(why)

    # -- every step ---------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Completed steps."""
        return self.training.step

    def _fetching(self) -> None:
        self.marks.fetching()
        faults.fire_at("data", self.step)

    def _around_backward(self, original: Any, loss: Any, *more: Any, **options: Any) -> None:
        if self._seats is None:
            self.training.before_backward(loss)
        else:
            loss = self._seats.weighed(loss, self.training.before_backward)
        if getattr(self._trainer.model_wrapped, "require_backward_grad_sync", False):
            original = partial(self._exchanges.by_ddp, original)
        original(loss, *more, **options)

    def _exchanged(self) -> None:
        self.session.status.found_rigid(shared.EXCHANGES)

    def _around_get_grad_norm(self, original: Any, *args: Any, **options: Any) -> Any:
        self.training.norm = norm = original(*args, **options)
        return norm

    def _around_maybe_log_save_evaluate(
        self, original: Any, tr_loss: Any, grad_norm: Any, *more: Any, learning_rate: Any = None
    ) -> None:
        training = self.training
        if self._trainer.state.global_step > training.step:
            faults.fire_at("step_end", training.step)
            training.before_completed()
            step = training.completed((grad_norm, learning_rate))
            self.session.step_completed(step)
            self.marks.step_end(step)
            self._replicas.step_over(training.trained)
        elif grad_norm is None:  # the end of an epoch, at which a resumed run stood
            grad_norm, learning_rate = training.last
        if self._trainer.control.should_evaluate:
            training.evaluates()
        original(tr_loss, grad_norm, *more, learning_rate=learning_rate)

    def evaluated(self) -> None:
        """A batch of an evaluation was made."""
        self.session.progress("validation")
        if hasattr(self, "training"):  # not where a callback evaluates before training begins
            self.training.evaluating()

    def _around_evaluate(self, original: Any, *args: Any, **options: Any) -> Any:
        """`eval_on_start` is for the start of the job: its restart goes on in the middle of what was one training."""
        record, place = self._record, self.core.place  # no record once the boundary is reached
        if record is not None and place.restarted and record.get("job", [""])[0] == place.job:
            return {}
        return original(*args, **options)

    # -- back to a boundary -------------------------------------------------------------------------------

    def _around_get_train_dataloader(self, original: Any) -> Any:
        loader = original()
        if not self._loaders:  # Trainer's own; scripts may ask for more of them, which nobody trains on
            self._follow(loader)
        return loader

    def _follow(self, loader: Any) -> None:
        below = getattr(loader, "base_dataloader", None)
        self._data.reads = reads = reads_of(loader)
        self._data.follow(below if reads else None)
        self._loaders = [loader, below]

    def _around_load_from_checkpoint(self, original: Any, path: str, *more: Any) -> None:
        if path != self._loaded:
            self._load_weights(original, path, *more)
        self._loaded = ""  # at the end it may be loaded again, as the best one

    def _load_weights(self, load: Any, path: str, *more: Any) -> None:
        """As Trainer does, and what it lacks. Of a PeftModel it leaves one adapter active, and alone trained."""
        with adapters_as_they_are(self._trainer.model):
            load(path, *more)
        load_beside(Path(path), self._trainer, self._record)

    def _around_load_optimizer_and_scheduler(self, original: Any, checkpoint: Any) -> None:
        trainer = self._trainer
        own = {"optimizer": trainer.optimizer}, {"scheduler": trainer.lr_scheduler}
        self._as_set = self._set_before(shared.AsSet(*own))
        record = self._record or {}
        self._as_set.tell(record.get("as_set"), self.session.note, self._trial)
        if self._record is not None and checkpoint is not None:
            original = classes_allowed(Path(checkpoint))(original)
        original = partial(_with_the_same_inside, original, trainer.lr_scheduler)
        if record.get("dtypes") != dtypes_of(trainer.model):
            original(checkpoint)
            return
        optimizer = inner_of(trainer.optimizer)
        around = partial(partial, _load_whole, optimizer)
        undo = adapter.replace_attribute(optimizer, "load_state_dict", around)
        try:
            original(checkpoint)
        except ValueError as error:  # torch's, which names neither the checkpoint nor what to do
            why = f"the optimizer: {error}. Are the same parameters trained (requires_grad) as when it was saved?"
            raise adapter.CheckpointMismatch(str(checkpoint), [why]) from error
        finally:
            undo()

    def _around_init_training_state(self, original: Any, max_steps: int, updates: int, *more: Any) -> tuple[int, int]:
        """At the end of an epoch a resumed run stands behind its last step, not before the next epoch.

        Trainer divides the steps by those of an epoch, where a callback may have ended epochs before.
        """
        epochs, batches = original(max_steps, updates, *more)
        args, step, record = self._trainer.args, self._trainer.state.global_step, self._record
        if record is None or not step or args.ignore_data_skip:
            return epochs, batches
        epoch, done, of = record["in_epoch"]
        if of != updates:  # other ranks, or another batch: the data are divided in another way
            epoch, done = (epochs - 1, updates) if step % updates == 0 else (epochs, step % updates)
        return epoch, done * args.gradient_accumulation_steps

    def _around_load_rng_state(self, original: Any, checkpoint: Any) -> None:
        if self._reread is None:
            original(checkpoint)
        elif self._reread and self._reread.end():
            self.session.note(REREAD)

    def _around_run_epoch(self, original: Any, **given: Any) -> None:
        training, begun = self.training, given["epoch"] == given["epochs_trained"]
        training.epoch, training.batches = given["epoch"], given["steps_in_epoch"]
        training.updates = given["num_update_steps_per_epoch"]
        consumed = given["steps_trained_in_current_epoch"] if begun else 0
        training.done = consumed // self._trainer.args.gradient_accumulation_steps
        record, self._record = self._record, None
        if record is not None:
            self._before = record.get("seconds", 0.0)
            training.began -= self._before
        given["start_time"] -= self._before
        self._values.starts()
        exact = record is not None and self._return(record, given)
        undo = adapter.replace_attribute(trainer_module, "skip_first_batches", skip_nothing if exact else lambda f: f)
        try:
            original(**given)
        finally:
            undo()

    def _around_finalize_training(self, original: Any, trial: Any, samples: Any, start_time: float) -> Any:
        """What it counts begins where the sums of the loss do."""
        found = original(trial, samples, start_time - self._before)
        remove_orphans_of(self._trainer.args)
        return found

    def _return(self, record: Record, given: dict[str, Any]) -> bool:
        """Stand on the boundary, and do what is due there. Returns whether the data are repeated exactly."""
        trainer, (rank, world), seats = self._trainer, self._values.stands_for, self._seats
        if (saved := record["world_size"]) != world:
            self.session.note(f"saved by {saved} ranks, resumed by {world}: not bit-equal, and Trainer finds its place "
                              "in the data by steps of the size that they have now: in the middle of an epoch some are "
                              "left out or trained twice")  # fmt: skip
        own = shared.own_aux(record, rank, world, self.session.note) if saved == world else None
        began = rng.RngRecorder(self.state.devices()).snapshot()
        position = self.training.restore(record, own)
        norm, rate = self.training.last
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss, norm, given["model"], given["trial"], given["epoch"], given["ignore_keys_for_eval"],
            given["start_time"], learning_rate=rate,
        )  # fmt: skip
        batches = given["steps_trained_in_current_epoch"]
        steps = batches // trainer.args.gradient_accumulation_steps
        if trainer.control.should_epoch_stop or trainer.control.should_training_stop:
            given["num_update_steps_per_epoch"] = steps
        exact = position is not None and self._data.followed and not trainer.args.ignore_data_skip
        if trainer.args.ignore_data_skip:
            self.session.note("ignore_data_skip=True: the epoch under way begins once more, with its first data")
        if batches and trainer.args.dataloader_num_workers:
            self.session.note(shared.WORKERS)
        if position is not None and exact:
            more = steps < given["num_update_steps_per_epoch"]
            self._data.resume(position, batches, more)
            if seats is not None:
                seats.resume(batches, more)
        if own is not None:
            skips = 0 < steps < given["num_update_steps_per_epoch"] and not trainer.args.ignore_data_skip
            due = self.training.recorder.snapshot_rng()
            seeded = draws_a_seed(self._loaders[0])
            self._reread = "" if exact else Rereading(began if skips else None, due, self.state.devices(), seeded)
        return exact

    # -- Trainer's own checkpoints ------------------------------------------------------------------------

    def _around_save_checkpoint(self, original: Any, *args: Any) -> None:
        wanted, step = self._trainer.args, self._trainer.state.global_step
        self._gasps.discard(step)
        self._call = partial(call_save, self._trainer.state, self._gasps, original, *args)
        path = path_of(Path(wanted.output_dir).absolute(), step)
        kept = not wanted.save_only_model or path.resolve() in self._good
        with unless_a_gasp_is_written(self.session.status, self._trainer.state):
            if kept and step == self.step and self.training.known:
                self.save()
                return
            if self.rank == 0:
                self._saves.forget(path)
            self._call()

    def save(self) -> None:
        """Trainer's own save of the last step, with a manifest. All ranks call it together."""
        step = self.step
        path = path_of(Path(self._trainer.args.output_dir).absolute(), step)
        own = shared.with_trailer(self.training.source.capture(step), self._values.written.wait(step))
        save = adapter.NativeSave(path, LAYOUT, step, own)
        self.session.progress("save")
        with self.marks.saving():
            if path.resolve() in self._good:
                self._keep(save)
            elif self._saved(save):
                self._good.add(path.resolve())
        self.session.progress("data")

    def _saved(self, save: adapter.NativeSave) -> bool:
        if self.rank == 0:
            self._saves.begin(save.path)
        else:
            faults.fire_at("periodic_save", save.step)
        undo = adapter.replace_attribute(trainer_module, "rotate_checkpoints", lambda _: lambda **_: None)
        try:
            self._call()
        finally:
            undo()
        if good := self._saves.commit(save):  # until then an older one may be the only good one
            rotate(self._trainer.args, self._trainer.state)
        return good

    def _keep(self, save: adapter.NativeSave) -> None:
        """There is a good checkpoint of this very step: do what else belongs to a save."""
        state, args = self._trainer.state, self._trainer.args
        if self.rank == 0:
            self._saves.adopt(save)
        step = state.best_global_step
        if step and step not in self._gasps and (best := path_of(Path(args.output_dir), step)).exists():
            state.best_model_checkpoint = str(best)
        rotate(args, state)


def _with_the_same_inside(load: Callable[[Any], None], scheduler: Any, checkpoint: Any) -> None:
    with shared.kept_inside([scheduler]):
        load(checkpoint)


def _load_whole(optimizer: Any, load: Callable[[Any], object], stored: Any) -> None:
    """torch gives the states the dtypes of their parameters."""
    load(stored)
    shared.give_dtypes_back(optimizer, stored)
