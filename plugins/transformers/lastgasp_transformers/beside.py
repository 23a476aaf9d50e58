"""What training changes and `save_pretrained` leaves out: of a PeftModel it writes the adapter alone.

LoRA with norms or embeddings unfrozen beside it is trained in more than that. It goes into lastgasp's own file, and is
loaded after what Trainer loads.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lastgasp import adapter
from lastgasp.adapter.torch import persistent_buffers

_ADAPTERS = "adapter_*.safetensors"
"""In them PEFT renames weights: `lora_A.default.weight` is `lora_A.weight`."""
_SMALL = 1 << 16
"""Bytes up to which a buffer is kept: statistics are small, and quantized weights, which do not change, are not."""


def left_out(
    folder: Path, model: nn.Module, values: Mapping[str, Tensor], optimizer: Any, *, by_name: bool
) -> dict[str, Tensor]:
    """Trained parameters, and small buffers, that Trainer cannot load from a checkpoint that was written.

    Args:
        model: as it was saved, without wrappers; values: of its parameters and buffers, as they are to be saved.
        optimizer: that has trained it.
        by_name: what is written under another name than the model's is not loaded, as by Trainer itself: of many models
            `save_pretrained` writes the names of the published checkpoints (ViT, experts), which Trainer passes over.

    Raises:
        OSError: the files cannot be read.
    """
    written = {name: count for file in folder.glob("*.safetensors") for name, count in _counts(file).items()}
    if not by_name and not hasattr(model, "peft_config") and _has_all(model, written):
        return {}
    lacking = {name: values.get(name, one).detach() for name, one in _changing(model, optimizer, written)}
    if lacking:
        for name in _renamed(lacking, folder.rglob(_ADAPTERS)):
            del lacking[name]
    return {name: value.to("cpu", copy=True).contiguous() for name, value in lacking.items()}


def put_back(path: Path, model: nn.Module, lacking: Mapping[str, Tensor]) -> None:
    """Load them.

    Raises:
        CheckpointMismatch: the model has no such parameters.
    """
    there: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    problems = [f"the model has no {name} of shape {tuple(value.shape)}" for name, value in lacking.items()
                if name not in there or there[name].shape != value.shape]  # fmt: skip
    if problems:
        raise adapter.CheckpointMismatch(str(path), problems)
    with torch.no_grad():
        for name, value in lacking.items():
            there[name].copy_(value)


def why_not_resumed(model: Any) -> str:
    """Why no checkpoint of this model can be loaded into the one that the script makes; empty if it can."""
    configs = getattr(model, "peft_config", None)
    kinds = [str(getattr(one, "peft_type", "")) for one in configs.values()] if isinstance(configs, dict) else []
    return (
        "AdaLoRA gives its matrices other ranks while it trains: once it has, no checkpoint fits the model that the "
        "script makes, and a run that is to resume is refused, as by Trainer alone. What is saved has the adapter"
    ) if any("ADALORA" in kind.upper() for kind in kinds) else ""  # fmt: skip


@contextlib.contextmanager
def adapters_as_they_are(model: nn.Module) -> Iterator[None]:
    """While something is loaded that makes one adapter the active one, and the only one that is trained."""
    trained, base = [(one, one.requires_grad) for one in model.parameters()], getattr(model, "base_model", None)
    active = getattr(base, "active_adapters", None)  # of a PeftModel; a method of models of transformers
    try:
        yield
    finally:
        if base is not None and isinstance(active, list) and base.active_adapters != active:
            base.set_adapter(active)
        for one, was in trained:
            one.requires_grad_(was)


def _has_all(model: nn.Module, written: Mapping[str, int]) -> bool:
    """Whether as many numbers were written as the model has, under whatever names, tied ones counted once."""
    owned: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    owned |= {name: owner[key] for name, (owner, key) in persistent_buffers(model)}
    all_own: dict[int, int] = {id(one): one.numel() for one in owned.values()}
    known = {id(owned[name]): count for name, count in written.items() if name in owned}
    others = sum(count for name, count in written.items() if name not in owned)
    return sum(known.values()) + others >= sum(all_own.values())


def _changing(model: nn.Module, optimizer: Any, written: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """That are not written under a name of theirs; tied ones have several."""
    trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
    known = set(written)
    found = {id(one) for name, one in model.named_parameters(remove_duplicate=False) if name in known}
    for name, one in model.named_parameters():
        if id(one) not in found and (one.requires_grad or id(one) in trained):
            yield name, one
    for name, (owner, key) in persistent_buffers(model):
        buffer = owner[key]
        if name not in known and buffer is not None and buffer.nbytes <= _SMALL:
            yield name, buffer


def _renamed(lacking: Mapping[str, Tensor], files: Iterable[Path]) -> list[str]:
    """Those whose very values stand in the files. Of several alike all must be there, else none counts as written."""
    forms = {_form(value) for value in lacking.values()}
    there = Counter(_content(one) for file in files for one in _tensors(file) if _form(one) in forms)
    contents = {name: _content(value) for name, value in lacking.items()}
    wanted = Counter(contents.values())
    return [name for name, content in contents.items() if there[content] >= wanted[content]]


def _form(value: Tensor) -> tuple[Any, ...]:
    return value.dtype, tuple(value.shape)


def _content(value: Tensor) -> tuple[Any, ...]:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return *_form(value), hash(flat.view(torch.uint8).numpy().tobytes())


def _counts(file: Path) -> dict[str, int]:
    """How many numbers each tensor in it has."""
    with safe_open(file, "pt") as opened:
        names = list(opened.keys())
        return {name: math.prod(opened.get_slice(name).get_shape()) for name in names}


def _tensors(file: Path) -> Iterator[Tensor]:
    with safe_open(file, "pt") as opened:
        for name in opened.keys():  # noqa: SIM118, it is no mapping
            yield opened.get_tensor(name)
