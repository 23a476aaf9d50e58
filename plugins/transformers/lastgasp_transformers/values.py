"""What subclasses of Trainer and callbacks keep in plain Python goes from a checkpoint to the run that resumes from it.

TRL's keep completions that further steps are trained on, sums for the log, counters. What is transformers' own is
restored by itself.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.trainer_callback import ExportableState, TrainerCallback

from lastgasp import adapter
from lastgasp.adapter import NotSaveable
from lastgasp.adapter.again import Began, Carried, Root, UserValues, changed, is_users
from lastgasp.adapter.torch import OnDemand, QueuedWork, Unsaved, split_trailer, users_parts
from lastgasp_transformers.held import HeldModules

VALUES, MODULES = "values", "modules"
"""In the record of a checkpoint: by rank, and by name (`HeldModules`)."""
_NAMED = 4
"""Values that are named."""
_ANEW = "is of another job, and callbacks of yours begin anew in each"
_OWN = ("transformers", "accelerate")
_OF_MODULES, _FEW = frozenset(vars(nn.Module())), 32


def is_others(cls: type) -> bool:
    """A class that is neither Trainer's nor lastgasp's: the user's, or one of an installed package (TRL)."""
    package = cls.__module__.partition(".")[0]
    return package not in _OWN and not package.startswith("lastgasp")


def roots_of(trainer: Any) -> list[Root]:
    """The Trainer, if it is a subclass, and callbacks that do not export their state; one of each class."""
    callbacks = [one for one in trainer.callback_handler.callbacks
                 if is_others(type(one)) and not isinstance(one, ExportableState)]  # fmt: skip
    several = Counter(type(one).__name__ for one in callbacks)
    roots = [Root(name, one) for one in callbacks if several[name := type(one).__name__] == 1]
    if is_others(type(trainer)):
        roots.append(Root(type(trainer).__name__, trainer, _names_in(type(trainer))))
    return roots


def roots_of_configs(model: nn.Module | None) -> list[Root]:
    """How models of transformers' generate: Seq2SeqTrainer's first evaluation changes it for later ones."""
    found: dict[int, Root] = {}
    for name, one in [] if model is None else model.named_modules():
        config = vars(one).get("generation_config") if isinstance(one, PreTrainedModel) else None
        if isinstance(config, GenerationConfig):
            found.setdefault(id(config), Root(f"{name}{name and '.'}generation_config", config))
    return list(found.values())


def roots_beside(trainer: Any, roots: list[Root]) -> list[Root]:
    """Modules that these hold beside the model, of a package or the user's: a loss has weights that a callback sets.

    Of few modules: those of a second model are looked at by `HeldModules` alone.
    """
    known = {id(one) for one in trainer.model.modules()} if trainer.model is not None else set[int]()
    found: list[Root] = []
    for root in roots:
        for name, value in vars(root.value).items():
            if name in root.skip or not isinstance(value, nn.Module):
                continue
            inner = [(place, one) for place, one in value.named_modules() if id(one) not in known]
            known |= {id(one) for _, one in inner}
            if len(inner) <= _FEW:
                found += [Root(f"{root.name}.{name}{place and '.'}{place}", one, _OF_MODULES)
                          for place, one in inner if is_others(type(one)) and not _is_torchs(type(one))]  # fmt: skip
    return found


def _is_torchs(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "torch"


def unsaved_of(trainer: Any) -> Unsaved:
    """What of these, and of modules, no checkpoint may have."""
    callbacks = [one for one in trainer.callback_handler.callbacks if not isinstance(one, ExportableState)]
    roots = [Root(type(one).__name__, one) for one in callbacks if is_others(type(one))]
    of_trainer = [root for root in roots_of(trainer) if root.value is trainer]
    roots += of_trainer + roots_beside(trainer, roots + of_trainer) + users_parts(trainer.model)
    return Unsaved(trainer.model, roots, "get_extra_state of modules, or state of an ExportableState,", is_others)


def _names_in(cls: type) -> frozenset[str]:
    """Attributes that code of Trainer's own names: none of them is a subclass's."""
    theirs = [one for base in cls.__mro__ if not is_others(base) for one in vars(base).values()]
    functions = [inspect.unwrap(one) for one in theirs if isinstance(one, FunctionType)]
    return frozenset(name for one in functions for name in one.__code__.co_names)


class CarriedValues:
    """Those of one call of `train`. Make it when all is as the script has it, and nothing is restored yet.

    Attributes:
        held: modules beside the model.
        written: what this rank has at the end of a step, as bytes.
        queued: what its accelerators have been given (`AuxRecorder.queued`), once training begins.
        stands_for: the rank whose values it takes from a checkpoint, and of how many.
    """

    def __init__(self, trainer: Any, place: adapter.Place, session: adapter.Session) -> None:
        self._trainer, self._place, self._session = trainer, place, session
        self.roots = roots_of(trainer)
        self.held = HeldModules(trainer, self.roots, session.note)
        self.roots = roots_beside(trainer, self.roots) + self.roots  # found in the others, they would be no roots
        configs = roots_of_configs(trainer.model)
        self.roots, self._alike = self.roots + configs, frozenset(root.name for root in configs)
        self.queued = QueuedWork(())
        self.stands_for = place.rank, place.world_size
        self._values: UserValues | None = None
        self._step, self._start = -1, Began()
        self._began = Began.of(self.roots, self._known())
        self.written = OnDemand(self._of, apart=trainer.args.device.type != "cpu")

    def _known(self) -> list[object]:
        model = self._trainer.model
        return [] if model is None else [*model.modules(), *model.parameters(), *model.buffers()]

    def starts(self) -> None:
        """The hooks of the start have run, and nothing is restored yet.

        Numbers and texts that they have set are the new process's own. Tensors are not: they were made of weights, as
        those of an average are, and a new process begins with others.
        """
        if self._values is not None:
            return
        known = self._known()
        self.held.starts()
        self._start, self._values = Began.of(self.roots, known), UserValues(self.roots, known)
        for root in self.roots:
            first, now = (one.digests.get(root.name, {}) for one in (self._began, self._start))
            for name, value in vars(root.value).items():
                if now.get(name) is not None and first.get(name) != now[name] and _has_tensors(value):
                    now[name] = b"made of weights"

    def take(self, step: int) -> None:
        """The end of a step: record all. Never raises."""
        if self._values is not None and self.roots:
            self._values.take()
            self._values.verify()
            self._step = step

    def _of(self, step: int) -> bytes:
        if self._values is None or not self.roots or step != self._step:
            return b""
        try:
            with self.queued.reading():
                return changed(self._values, self._began, self._start, self._place.world_size)
        except NotSaveable:  # the device does not answer
            return b""

    def missing(self, values: Mapping[int, bytes], unsaved: Unsaved) -> list[str]:
        """What to note on a checkpoint with these values, by rank."""
        carried = Carried(values, self._place.world_size, self._alike)
        why = carried.why and (f"nothing that {', '.join(root.name for root in self.roots)} keep beside the state is "
                               f"saved: {carried.why}")  # fmt: skip
        changed = unsaved.note(carried.names | self.held.names())
        named = [f"{name} ({how})" for name, how in sorted(carried.refused.items()) if name not in changed][:_NAMED]
        lost = f"training has changed what cannot be saved: {', '.join(named)}" if named else ""
        return [note for note in (why, changed, lost) if note]

    def restore(self, record: Mapping[str, Any], of_this_job: bool) -> list[str]:
        """Give this process what a checkpoint has. All ranks call it together. Returns what to note, on rank 0.

        Args:
            of_this_job: saved by it; what callbacks of the user's have counted in another one, up to its end, say, is
                no matter of this one.

        Raises:
            LastgaspError: another rank is gone.
        """
        callbacks = [root for root in self.roots if isinstance(root.value, TrainerCallback)]
        anew = [] if of_this_job else [one.name for one in callbacks if is_users(type(one.value))]
        theirs = [root.name for root in self.roots if root.name.partition(".")[0] in anew]
        modules = record.get(MODULES, {})
        left = [name for name in modules if name.partition(".")[0] in theirs]
        notes = [f"{name} {_ANEW}" for name in left]
        notes += self.held.put_back({name: state for name, state in modules.items() if name not in left})
        notes.append(self._restore_values(record, theirs))
        return [note for note in notes if note and self._place.rank == 0]

    def _restore_values(self, record: Mapping[str, Any], theirs: list[str]) -> str:
        world, (rank, size) = record["world_size"], self.stands_for
        carried = Carried(record.get(VALUES, {}), world, self._alike)
        if not carried.any:
            return ""
        if world != size:
            return "what training had changed beside the state begins with the script's values: the ranks are others"
        carried.leave(theirs, _ANEW)
        refused = carried.prepare(rank, self.roots, self._began, self._trainer.args.device)
        return carried.restore(self._session.gather(f"values/{record['job']}/{record['step']}", refused))


def split(aux: Mapping[int, bytes]) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """The ranks' auxiliary states, and the values of those that have sent them."""
    parts = {rank: split_trailer(data) for rank, data in aux.items()}
    return {rank: one[0] for rank, one in parts.items()}, {rank: one[1] for rank, one in parts.items() if one[1]}


def _has_tensors(value: Any, deep: int = 3) -> bool:
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return deep > 0 and any(_has_tensors(one, deep - 1) for one in parts)
