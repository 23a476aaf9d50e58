"""All buffers of a fit that belong in its checkpoint: the module's, and those of averaged models of callbacks.

While it validates, WeightAveraging has the averaged weights in the module, and the module's in its own model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from lastgasp.adapter import NotSaveable, RankStatus
from lastgasp_lightning.compat import Undo, WeightAveraging, replace_method

_AVERAGE = "lastgasp_average"


def with_averages(trainer: Any) -> nn.Module:
    """The module, or a container of it and of averaged models of callbacks, under names with lastgasp's prefix."""
    module: nn.Module = trainer.lightning_module
    kept = [getattr(cb, "_average_model", None) for cb in trainer.callbacks if isinstance(cb, WeightAveraging)]
    averages = [average.module for average in kept if average is not None]
    if not averages:
        return module
    both = nn.Module()
    both._modules[""] = module  # set directly: its buffers keep their names only under an empty name
    both._modules.update({f"{_AVERAGE}{number}": average for number, average in enumerate(averages)})
    return both


def are_synced(options: Mapping[str, Any]) -> bool:
    """Whether DDP, given these, broadcasts rank 0's buffers before each forward pass. torch 2.13 has renamed it."""
    new, old = options.get("forward_sync_buffers"), options.get("broadcast_buffers")
    return bool(new) if new is not None else old is None or bool(old)


class Exchange:
    """Knows when averaged weights stand in the module, and lets nobody read them while they are exchanged.

    Args:
        before: called before an exchange, as before an update; may wait for a save, and end the training.
        status: of this rank, where a save reads it (not where another engine counts the updates).
    """

    def __init__(self, before: Callable[[], None], status: RankStatus | None) -> None:
        self._before, self._status = before, status
        self._done = self._under_way = False

    def install(self, trainer: Any) -> Undo:
        """Follow the callbacks of `trainer`."""
        undo = [
            replace_method(callback, "_swap_models", self._around)
            for callback in trainer.callbacks
            if isinstance(callback, WeightAveraging)
        ]
        return lambda: [one() for one in undo].clear()

    def _around(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def exchange(module: Any) -> None:
            status = self._status
            if status is not None:
                self._before()
            self._under_way = True
            original(module)
            self._done, self._under_way = not self._done, False
            if status is not None:
                status.inside, status.begun = False, status.step

        return exchange

    @property
    def done(self) -> bool:
        """The averaged weights are in the module. Raises NotSaveable: half of them are."""
        if self._under_way:
            raise NotSaveable("WeightAveraging is exchanging the weights for the averaged ones")
        return self._done

    def put(self, checkpoint: dict[str, Any], buffers: Mapping[str, Tensor], holder: nn.Module) -> None:
        """Put the buffers of a boundary, which `holder` names, and the weights where they belong, into Lightning's."""
        live = {t.data_ptr(): n for n, t in holder.named_buffers(remove_duplicate=False)}
        both = checkpoint["state_dict"], checkpoint.get("current_model_state", {})
        found = set()
        for states in both:
            for name, value in states.items():
                # by address: a strategy or a callback may have put other tensors there
                if isinstance(value, Tensor) and live.get(value.data_ptr()) in buffers:
                    states[name] = buffers[live[value.data_ptr()]]
                    found.add(name)
        averaged, current = both
        for name in [name for name in current if self.done and name in averaged and name not in found]:
            averaged[name], current[name] = current[name], averaged[name]
