"""Checkpoints as Trainer writes them: `checkpoint-N` directories, with one more file that Trainer does not look at."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn
from transformers import PreTrainedModel, TrainerState
from transformers import trainer as trainer_module

from lastgasp import adapter
from lastgasp.adapter import checkpoint
from lastgasp.adapter.files import unique_temp
from lastgasp.adapter.torch import as_tensor, decode_aux, with_added
from lastgasp_transformers.beside import left_out, put_back
from lastgasp_transformers.shares import by_seat
from lastgasp_transformers.values import VALUES, split

LAYOUT = checkpoint.DirectoryLayout("checkpoint-[0-9]*")
FORMAT, VERSION = "transformers", 1
RECORD, OPTIMIZER, SCHEDULER = "lastgasp.pt", "optimizer.pt", "scheduler.pt"
BESIDE = "beside"
"""In the record: what training changes of the model and `save_pretrained` has not written."""
INCOMPLETE = "checkpoint-is-incomplete.txt"
"""As Trainer's own just-in-time checkpoint has it; it is there while ranks write."""
_WEIGHTS_ALONE = "has weights alone, or is incomplete: there is no optimizer.pt"
_BY_PATH = (
    "Refusing to start from scratch over them. Give resume_from_checkpoint=<path> to begin with one of them and a new "
    "optimizer, or leave it out to start anew."
)
Record = dict[str, Any]

log = logging.getLogger("lastgasp")


def path_of(directory: Path, step: int) -> Path:
    """The path of the checkpoint of a step."""
    return directory / f"checkpoint-{step}"


def read_record(path: Path) -> Record | None:
    """What lastgasp has put into a checkpoint; None where it was written without.

    Raises:
        ValueError: of a version that this code does not know.
    """
    if not (path / RECORD).exists():
        return None
    found: Record = torch.load(path / RECORD, map_location="cpu", weights_only=False)  # verified, and of our own
    if found["version"] != VERSION:
        raise ValueError(f"it has lastgasp state of version {found['version']}, this lastgasp reads {VERSION}")
    with_added(found, path, LAYOUT)
    found["small"], values = split(found["small"])
    found[VALUES] = values | found.get(VALUES, {})
    return by_seat(found, (VALUES,))


class Policy(adapter.SelectionPolicy):
    """Checkpoints that a killed process has left incomplete, and those of weights alone, are none.

    Attributes:
        wanted: the user has said that there is one (`resume_from_checkpoint=True`).
    """

    wanted = False
    _weights: tuple[Path, ...] = ()

    def candidates(self, own: bool) -> list[checkpoint.Candidate]:
        """Those that training can be resumed from."""
        found = super().candidates(own)
        bare = [one.path for one in found if one.manifest is None and not (one.path / INCOMPLETE).exists()]
        self._weights = tuple(path for path in bare if not (path / OPTIMIZER).exists())
        whole = {*bare} - {*self._weights}
        return [one for one in found if one.manifest is not None or one.path in whole]

    def named(self, path: Path) -> checkpoint.Candidate:
        """As ever, but for an incomplete one."""
        found = super().named(path)
        if found.manifest is None and (path / INCOMPLETE).exists():
            problem = f"it is incomplete: the process that wrote it was killed ({INCOMPLETE} lies in it)"
            return dataclasses.replace(found, problem=found.problem or problem)
        return found

    def lost(self, agreement: checkpoint.Agreement, gather: adapter.Gather) -> dict[str, str]:
        """Also checkpoints of weights alone, where the user has asked for one."""
        found = super().lost(agreement, gather)
        if found or not self.wanted or self.place.restarted:
            return found
        return {str(path): _WEIGHTS_ALONE for path in self._weights}

    def remedy(self, agreement: checkpoint.Agreement) -> str:
        """A path is what Trainer takes for them."""
        return _BY_PATH if self._weights and not agreement.rejected else super().remedy(agreement)

    def begins_from_scratch(self) -> None:
        """Say what is not used."""
        if self._weights and self.place.rank == 0:
            newest, others = self._weights[0], len(self._weights) - 1
            log.warning("training begins from scratch: %s (and %d more) %s", newest, others, _WEIGHTS_ALONE)


def write_checkpoint(staged: checkpoint.Staged, trainer: Any, dump: Record, record: Record, state: Record) -> None:
    """What Trainer writes on rank 0, and the random states of all ranks that are known. Enters no collective.

    Args:
        dump: model, optimizer, scheduler and scaler (`TorchState.dump`).
        record: has the auxiliary states; state: the fields of a TrainerState.

    Raises:
        NotSaveable: the model writes its weights in another way.
        OSError: the disk refused.
    """
    folder, name = unique_temp(staged.target), staged.target.name
    try:
        _write(folder, trainer, dump, record, state)
        files = {f"{name}/{p.relative_to(folder).as_posix()}": p for p in folder.rglob("*") if p.is_file()}
        staged.take(folder, files)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def bare(trainer: Any) -> Any:
    """Its model without wrappers."""
    return trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)


def lacking_of(folder: Path, trainer: Any, values: Record, optimizer: Any) -> Record:
    """What Trainer, or a subclass that loads in its own way, cannot load of its model from what was written there."""
    return left_out(folder, bare(trainer), values, optimizer, by_name=not _loads_in_its_own_way(trainer))


def _loads_in_its_own_way(trainer: Any) -> bool:
    return type(trainer)._load_from_checkpoint is not trainer_module.Trainer._load_from_checkpoint


def load_beside(path: Path, trainer: Any, record: Record | None) -> None:
    """Load what Trainer does not, once: it is taken out of the record.

    Raises:
        CheckpointMismatch: the model is another one.
    """
    if record is not None and (lacking := record.pop(BESIDE, None)):
        put_back(path, bare(trainer), lacking)


_CARD = "create_model_card"
_RANK_0_ALONE = "should_save_on_this_rank"
"""A model's method, from transformers 5.15 on; any rank may be the one that is left."""


def _write(folder: Path, trainer: Any, dump: Record, record: Record, state: Record) -> None:
    folder.mkdir()
    model = bare(trainer)
    with ExitStack() as undo:
        for one in model.modules():
            if hasattr(one, _RANK_0_ALONE):
                undo.callback(adapter.replace_attribute(one, _RANK_0_ALONE, lambda _: lambda *_: True))
        _write_model(folder, trainer, model, dump["model"])
    if not any(folder.rglob("*.safetensors")):
        raise adapter.NotSaveable("save_pretrained() of this model writes no *.safetensors")
    record = record | {BESIDE: lacking_of(folder, trainer, dump["model"], trainer.optimizer)}
    processing = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    if processing is not None:
        processing.save_pretrained(folder)
    complete = by_seat(record, ())
    one = complete["world_size"] == 1
    files = {"training_args.bin": trainer.args, OPTIMIZER: dump["optimizer"], SCHEDULER: dump["scheduler"],
             "scaler.pt": dump["scaler"], RECORD: record}  # fmt: skip
    for rank, data in complete["small"].items():
        files["rng_state.pth" if one else f"rng_state_{rank}.pth"] = _random_state(decode_aux(data).rng, one)
    for file, value in files.items():
        if value is not None:
            torch.save(value, folder / file)
    TrainerState(**state).save_to_json(str(folder / "trainer_state.json"))


def _write_model(folder: Path, trainer: Any, model: Any, values: Record) -> None:
    own = getattr(model, "save_pretrained", None)
    if isinstance(model, (PreTrainedModel, getattr(trainer_module, "PeftModel", PreTrainedModel))):  # as Trainer asks
        model.save_pretrained(folder, state_dict=values, is_main_process=True)
    elif callable(own) and _loads_in_its_own_way(trainer):
        with _states_are(model, values):  # of sentence-transformers, which loads what it has written alone
            own(str(folder), **({_CARD: False} if _CARD in inspect.signature(own).parameters else {}))
    else:
        safetensors.torch.save_file(values, folder / "model.safetensors", metadata={"format": "pt"})


@contextmanager
def _states_are(model: nn.Module, values: Record) -> Iterator[None]:
    """While it is saved by methods of its own: `state_dict` of it, and of each module in it, has these values."""

    def having(place: str) -> Any:
        def give(module: nn.Module, state: Record, prefix: str, metadata: object) -> None:
            for name in (*module._parameters, *module._buffers):
                if prefix + name in state and place + name in values:
                    state[prefix + name] = values[place + name]

        return give

    with ExitStack() as undo:
        for place, module in model.named_modules():
            hook = module.register_state_dict_post_hook(having(f"{place}." if place else ""))
            undo.callback(hook.remove)
        yield


def _random_state(state: Any, one: bool) -> Record:
    """As Trainer saves it."""
    numpy, inner = state.numpy, state.numpy["state"]
    found: Record = {"python": state.python, "cpu": as_tensor(state.torch)}
    found["numpy"] = (numpy["bit_generator"], inner["key"], inner["pos"], numpy["has_gauss"], numpy["gauss"])
    if state.accelerators and torch.cuda.is_available():
        own = as_tensor(state.accelerators[0])
        found["cuda"] = own if one else [own] * torch.cuda.device_count()
    return found
