"""Ranks may wait for each other between the updates of one batch, so that a fault stops all there: in manual
optimization, and where an optimizer moves the weights and calls its closure again (LBFGS).

What is saved then is a copy of the step before, which is kept until the batch has been trained on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS

from lastgasp.adapter import RankStatus
from lastgasp.adapter.torch import Copies, address, collectives_begun
from lastgasp_lightning.compat import Undo, replace_method

log = logging.getLogger("lastgasp")


class StepCopies:
    """Parameters, optimizer states and the precision plugin's state, from before the first update of a batch.

    They are copied from the start with LBFGS and where a batch has several optimizers, else once ranks have met behind
    an update.

    Args:
        status: of this rank, which can be saved while there is a copy; None: nothing is ever copied.
        gate: as `LightningState.gate`; copied: called when copies have been queued that a gasp may read.

    Attributes:
        copying: whether copies are taken.
    """

    def __init__(self, status: RankStatus | None, gate: Callable[[], None], copied: Callable[[], object]) -> None:
        self._status, self._gate, self._copied = status, gate, copied
        self._copies: Copies | None = None
        self._plugin: Any = None
        self.copying, self._tells, self._begun = False, False, 0
        self._kept: tuple[str, Any] = "", {}

    def install(self, trainer: Any, holder: nn.Module) -> Undo:
        """Follow the batches of a fit. `holder`: of all parameters."""
        automatic = trainer.lightning_module.automatic_optimization
        several = any(isinstance(one, LBFGS) for one in trainer.optimizers)
        if self._status is None or (automatic and not several):
            return lambda: None
        self._plugin, self._tells = trainer.precision_plugin, trainer.is_global_zero
        self._copies, self.copying = Copies([holder], trainer.optimizers), several or len(trainer.optimizers) > 1
        epoch = trainer.fit_loop.epoch_loop
        loop = epoch.automatic_optimization if automatic else epoch.manual_optimization
        return replace_method(loop, "run", self._around)

    @property
    def valid(self) -> bool:
        """There is a copy of the last step, and an update has begun since."""
        return self._copies is not None and self._copies.valid

    def take(self) -> None:
        """The first update of a batch is about to begin."""
        copies, status = self._copies, self._status
        if copies is None or status is None:
            return
        self._begun = collectives_begun()
        if not self.copying:
            return
        first = not copies.nbytes
        try:
            copies.take()
            self._kept = type(self._plugin).__qualname__, self._plugin.state_dict()
        except Exception as error:  # no memory for it
            log.warning("no copy of the state can be kept (%s: %s): a fault between two updates of a batch costs steps "
                        "since the last checkpoint", type(error).__name__, str(error).partition("\n")[0])  # fmt: skip
            self._copies, self.copying = None, False
            return
        if first and self._tells:
            log.info("a fault may come between an update and the end of training_step, so a copy of the state is kept "
                     "from now on: %.1f MB", copies.nbytes / 1e6)  # fmt: skip
        self._copied()
        status.inside = False

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            before = self._begun
            result = original(*args, **kwargs)
            if self.valid:
                self.over()
            elif self._begun != before and collectives_begun() != self._begun:
                self.copying = True
            return result

        return run

    def over(self) -> None:
        """The batch's updates are complete: what is live counts."""
        if self._copies is not None and self._copies.valid:
            self._gate()  # from the copy to the live state
            self._copies.valid = False

    def put(self, checkpoint: dict[str, Any], has_copy: bool) -> None:
        """Into what Lightning has dumped, in place of what is live."""
        if self._copies is None or not has_copy:
            return
        kept = dict(self._copies.parameters())
        for states in (checkpoint["state_dict"], checkpoint.get("current_model_state", {})):
            for name, value in states.items():
                if isinstance(value, Tensor) and value.numel():
                    states[name] = kept.get(address(value), value)
        checkpoint["optimizer_states"] = self._copies.optimizers()
        name, precision = self._kept
        if precision:
            checkpoint[name] = precision
