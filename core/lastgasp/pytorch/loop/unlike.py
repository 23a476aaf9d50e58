"""What keeps a checkpoint from being loaded: other models, other optimizers, and buffers that training itself makes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lastgasp.pytorch.buffers import persistent_buffers


def model_problems(name: str, module: nn.Module, stored: Mapping[str, Any]) -> list[str]:
    """How the stored state of a model differs from what `module` can load."""
    own = module.state_dict()
    lines = [f"model {name}: {key} is not in the checkpoint" for key in own if key not in stored]
    lines += [f"model {name}: {key} is only in the checkpoint" for key in stored if key not in own]
    for key, value in own.items():
        other = stored.get(key)
        if not isinstance(value, Tensor) or not isinstance(other, Tensor) or is_lazy(value) or is_lazy(other):
            continue  # a lazy one gets its shape when it is loaded
        if value.shape != other.shape:
            if loads_itself(module, key):
                continue
            lines.append(f"model {name}: {key} is {list(other.shape)} in the checkpoint and {list(value.shape)} here")
    return lines if len(lines) <= 8 else [*lines[:8], f"and {len(lines) - 8} more of model {name}"]


def loads_itself(module: nn.Module, key: str) -> bool:
    """Whether a module decides itself what it loads: observers of quantization take any shape of their buffers."""
    owner = module.get_submodule(key.rpartition(".")[0])
    return type(owner)._load_from_state_dict is not nn.Module._load_from_state_dict


def optimizer_problems(name: str, optimizer: Any, stored: Mapping[str, Any]) -> list[str]:
    """The same of an optimizer."""
    own = [len(group["params"]) for group in optimizer.param_groups]
    other = [len(group["params"]) for group in stored.get("param_groups", [])]
    if own == other:
        return []
    later = " (add_param_group must be called before the session opens)" if own == other[: len(own)] else ""
    return [f"optimizer {name}: its groups have {other} parameters in the checkpoint and {own} here{later}"]


class MadeBuffers:
    """Buffers that `forward` registers, fills or lets grow: a new process has others, and refuses the checkpoint.

    Args:
        module: as it is before it trains.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._lazy = {name for name, one in module.named_buffers() if is_lazy(one)}
        self._before = _shapes(module)

    def note(self) -> str:
        """What to note; empty where there are none. Any thread may ask; never raises."""
        try:
            now = _shapes(self._module)
            made = [name for name, shape in now.items() if self._before.get(name) != shape and name not in self._lazy
                    and not loads_itself(self._module, name)]  # fmt: skip
        except Exception:  # the user's objects, which training may be changing at this moment
            return ""
        named = ", ".join(made[:4]) + (f" and {len(made) - 4} more" if len(made) > 4 else "")
        return (
            f"forward makes buffers, or changes their shape: {named}. A new process has not done so when it resumes, "
            "and refuses each checkpoint. Register them in __init__ with their final shape; for what grows there is "
            "get_extra_state"
        ) if made else ""  # fmt: skip


class AddedGroups:
    """Parameters that come into optimizers while they train: a new process has fewer, and refuses the checkpoint.

    Args:
        optimizers: as they are before they train.
    """

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self._optimizers = list(optimizers)
        self._before = self._sizes()
        self._told = False

    def _sizes(self) -> list[list[int]]:
        return [[len(group["params"]) for group in one.param_groups] for one in self._optimizers]

    def new(self) -> str:
        """The note, where it was not told yet. At the end of a step."""
        found = "" if self._told else self.note()
        self._told = self._told or bool(found)
        return found

    def note(self) -> str:
        """What to note; empty where there are none. Any thread may ask."""
        return (
            "parameters were added to an optimizer in the middle (add_param_group). A new process has not done so when "
            "it resumes, and refuses each checkpoint. Give all of them from the start, those that come later frozen or "
            "with lr=0"
        ) if self._sizes() != self._before else ""  # fmt: skip


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    found = ((name, holder[key]) for name, (holder, key) in persistent_buffers(module))
    return {name: tuple(value.shape) for name, value in found if value is not None}
