"""Modules that a Trainer or a callback holds beside the model and training changes: a reference that follows it.

`save_pretrained` of the model has nothing of them. They are saved whole where their numbers are others than before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lastgasp.adapter.again import Root

_SAMPLED = 256
"""Numbers of each tensor that are compared."""
States = dict[str, dict[str, Tensor]]
"""By name of the module."""


class HeldModules:
    """Those of one training. They count as unchanged between its steps: callbacks change them at the end of one.

    Args:
        trainer: what is in its model is saved elsewhere.
        roots: Trainer and callbacks that may hold some.
        note: told of those that cannot be read, which are not saved; training goes on.
    """

    def __init__(self, trainer: Any, roots: Iterable[Root], note: Callable[[str], object]) -> None:
        self._trainer, self._roots, self._note = trainer, list(roots), note
        self._before: dict[str, bytes] = {}
        self._unread = set[str]()
        self._script = set(self._found())
        self._always = set[str]()

    def starts(self) -> None:
        """The hooks of the start have run: what they have made is made of the weights that this process began with."""
        found = self._found()
        self._before = {name: digest for name, one in found.items()
                        if name in self._script and (digest := self._digest(name, one))}  # fmt: skip
        self._always |= found.keys() - self._script

    def names(self) -> set[str]:
        """Attributes whose modules are saved, should training change them."""
        saved = {id(one) for name, one in self._found().items() if name not in self._unread}
        return {attribute for attribute, _, one in self._candidates() if id(one) in saved}

    def changed(self) -> States:
        """What training has changed. Never raises."""
        states: States = {}
        for name, one in self._found().items():
            if name not in self._always:
                digest = self._digest(name, one)
                if digest is None or digest == self._before.get(name):
                    continue
            try:
                states[name] = {key: value.detach().to("cpu", copy=True) for key, value in self._state(one).items()}
            except Exception as error:  # of a kind of tensor, or of a device
                self._cannot(name, error)
        return states

    def put_back(self, states: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
        """Give them what was saved. Returns, one line each, what has no place here."""
        found, missing = self._found(), list[str]()
        for name, state in states.items():
            here = self._state(found[name]) if name in found else {}
            if {key: value.shape for key, value in here.items()} != {key: value.shape for key, value in state.items()}:
                missing.append(f"{name} is another module than when it was saved, or none: it begins with the script's")
                continue
            self._always.add(name)
            with torch.no_grad():
                for key, value in here.items():
                    value.copy_(state[key])
        return missing

    def _found(self) -> dict[str, nn.Module]:
        model, found = self._trainer.model, dict[str, nn.Module]()
        known = {id(one) for one in model.modules()} if model is not None else set()
        for attribute, place, one in self._candidates():
            if id(one) in known or any(part is model for part in one.modules()) or not self._state(one):
                continue
            known.add(id(one))
            found[attribute + place] = one
        return found

    def _candidates(self) -> Iterator[tuple[str, str, nn.Module]]:
        """The attribute, the place in it, and the module."""
        for root in self._roots:
            for name, value in vars(root.value).items():
                parts = value if isinstance(value, list | tuple) else [value]
                for place, one in enumerate(parts if name not in root.skip else ()):
                    if isinstance(one, nn.Module):
                        yield f"{root.name}.{name}", f".{place}" if parts is value else "", one

    def _state(self, module: nn.Module) -> dict[str, Tensor]:
        """Its tensors that are not the model's and have numbers: those on "meta" do not, nor lazy ones as yet."""
        model = self._trainer.model
        own = {id(one) for one in (*model.parameters(), *model.buffers())} if model is not None else set()
        all_named = (*module.named_parameters(), *module.named_buffers())
        return {name: one for name, one in all_named if id(one) not in own and not one.is_meta and not is_lazy(one)}

    def _digest(self, name: str, module: nn.Module) -> bytes | None:
        """None if it cannot be read."""
        try:
            return _digest(self._state(module).values())
        except Exception as error:  # of a kind of tensor, or of a device
            self._cannot(name, error)
            return None

    def _cannot(self, name: str, error: Exception) -> None:
        if name not in self._unread:
            self._unread.add(name)
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            self._note(f"{name} is not saved, since it cannot be read: {why}")


def _digest(tensors: Iterable[Tensor]) -> bytes:
    """Of numbers out of each tensor: changes of `.data` are not counted by torch."""
    found = hashlib.blake2b(digest_size=16)
    for one in tensors:
        flat = one.detach().reshape(-1)
        part = flat[:: max(1, flat.numel() // _SAMPLED)].contiguous().cpu()
        found.update(part.view(torch.uint8).numpy().tobytes())
    return found.digest()
