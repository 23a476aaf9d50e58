"""What a fit of shards leaves in its arenas besides: with it a restart begins there, and reads no file.

It is what stands in the checkpoint's own files, made at each copy. Where somebody's `on_save_checkpoint` takes part in
that it is left out, since such a hook may write files, and is not to be called at each step: then a restart reads
files.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden

from lastgasp.adapter import cause_of
from lastgasp.adapter.sharded import Payload

log = logging.getLogger("lastgasp")

Files = tuple[dict[str, Any], dict[str, Any]]
"""Lightning's checkpoint without tensors, and our record."""
_OURS = "lastgasp_lightning."


@dataclass(frozen=True)
class Restored:
    """The small state of the step that a fit began with; none of it is changed by those who load it.

    Attributes:
        step: the step; groups: values of each optimizer's parameter groups.
        more: what was left; aux: auxiliary states by rank, as far as they are known here.
    """

    step: int
    groups: list[list[dict[str, Any]]]
    more: bytes
    aux: Mapping[int, bytes]

    @staticmethod
    def of(step: int, more: bytes, aux: Mapping[int, bytes]) -> Restored:
        """From what was left."""
        return Restored(step, pickle.loads(more)[1][1]["param_groups"], more, aux)

    def files(self, aux: Mapping[int, bytes]) -> Files:
        """New ones, with these auxiliary states besides the known ones."""
        checkpoint, record = pickle.loads(self.more)[1]
        return checkpoint, record | {"small": {**self.aux, **aux}}


class Leaving:
    """Writes and judges it.

    Args:
        run: the `LightningRun`.
    """

    def __init__(self, run: Any) -> None:
        self._run, self._why = run, ""
        self._can: bool | None = None

    def written(self, files: Callable[[], Files]) -> bytes:
        """What goes into the arena; empty where a restart is to read files. Never raises: training goes on."""
        if self._can is False:
            return b""
        try:
            if self._can is None and not self._asked():
                return b""
            data = self.dumped(files())
        except Exception as error:  # of the user's objects
            self._say(f"the state of callbacks, data or loops cannot be dumped at a step ({cause_of(error)})")
            return b""
        self._can = True
        return data

    def dumped(self, files: Files) -> bytes:
        """These files, for `Restored.of`."""
        checkpoint, record = files
        return pickle.dumps((self._about(), (checkpoint, record | {"small": {}})), pickle.HIGHEST_PROTOCOL)

    def cannot(self) -> str:
        """Why nothing of the kind is left in the arena; empty if it is, as far as is known."""
        return self._why

    def why_not(self, payload: Payload) -> str:
        """Why it is none for this fit; empty if it is one."""
        try:
            found = pickle.loads(payload.more)[0]
        except Exception as error:  # a class that this script does not have any more
            return f"it cannot be read ({cause_of(error)})"
        here = self._about()
        return "" if found == here else f"it is of {found[0]}, and this is {here[0]}, or of another model"

    def _about(self) -> tuple[str, str]:
        fit = self._run.fit
        return f"fit {fit.number()} in {self._run.config.directory}", fit.fit.model

    def _asked(self) -> bool:
        found = hooked(self._run.trainer)
        if found:
            self._say(f"{found}.on_save_checkpoint belongs to a checkpoint, and is not called at each step")
        return not found

    def _say(self, why: str) -> None:
        self._can, self._why = False, why
        if self._run.place.rank == 0:
            log.info("%s: if all ranks are killed at once, a restart begins with the newest checkpoint, not with what "
                     "arenas hold", why)  # fmt: skip


def hooked(trainer: Any) -> str:
    """Who adds something to a checkpoint in a hook; empty if nobody does."""
    if is_overridden("on_save_checkpoint", trainer.lightning_module):
        return type(trainer.lightning_module).__name__
    for callback in trainer.callbacks:
        hook = type(callback).on_save_checkpoint
        if "on_save_checkpoint" in vars(callback) or not (
            hook is Callback.on_save_checkpoint or hook.__module__.startswith(_OURS)
        ):
            return type(callback).__name__
    return ""
