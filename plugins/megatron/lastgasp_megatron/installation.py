"""`install()`: put the hooks in place, as late as possible, and keep them there (docs/facts/megatron.md §4).

Early, as soon as a module is imported: the option parser, and `pretrain` and `initialize_megatron` as triggers.
Late, when a trigger is called and all of MindSpeed's adaptors have run: everything else.
`torch.distributed.init_process_group` is a trigger too, which nobody replaces.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from lastgasp.errors import ConfigError, MissingExtra
from lastgasp.startup_refusal import tell_launcher
from lastgasp_megatron import mindspeed
from lastgasp_megatron.args import around_parse_args
from lastgasp_megatron.patches import HOMES, Around, Hook, Patches

log = logging.getLogger("lastgasp")

ENV_ON = "LASTGASP"
_SWITCH = {"1": True, "0": False, "": True}
_TRAINING = "megatron.training.training"

_installed: Installation | None = None


def install() -> bool:
    """Protect the Megatron training of this process. Idempotent; call it before or after importing Megatron.

    Returns:
        Whether it is installed: not in a child that multiprocessing has spawned, not with `LASTGASP=0`.

    Raises:
        ConfigError: `LASTGASP` is neither 1 nor 0.
        MissingExtra: torch is not installed.
    """
    global _installed
    tell_launcher()
    value = os.environ.get(ENV_ON, "")
    if value not in _SWITCH:
        raise ConfigError(ENV_ON, value, "1 (on) or 0 (off)", "Set it to 1, or unset it.")
    if multiprocessing.parent_process() is not None:
        return False
    if not _SWITCH[value]:
        log.warning("lastgasp is off: LASTGASP=0")
        return False
    if _installed is None:
        _installed = Installation()
        _installed.begin()
    return True


def uninstall() -> None:
    """Put everything back as it was, where it still is ours. Idempotent."""
    global _installed
    installed, _installed = _installed, None
    if installed is not None:
        installed.undo()


class Installation:
    """The hooks of one process.

    Args:
        late: what to wrap once a trigger is called; left out, the hooks of `lastgasp_megatron.hooks`.
    """

    def __init__(self, late: Callable[[Installation], list[Hook]] | None = None) -> None:
        self._make_late = late or _hooks
        self._early = Patches(
            [
                Hook("megatron.training.arguments", "parse_args", around_parse_args),
                Hook(_TRAINING, "pretrain", self._around_pretrain),
                Hook("megatron.training.initialize", "initialize_megatron", self._trigger),
            ]
        )
        self._late: Patches | None = None
        self._undo: list[Callable[[], None]] = []
        self._active = False
        self.outermost: Around = _call
        """Called instead of `pretrain`; the late hooks set it."""

    def begin(self) -> None:
        """Wrap what is imported, and the rest when it is.

        Raises:
            MissingExtra: torch is not installed.
        """
        self._active = True
        for name in HOMES:
            wrapt.register_post_import_hook(self._imported, name)
        self._undo.append(self._hook_process_group())

    def undo(self) -> None:
        """Take everything back. Idempotent."""
        self._active = False
        for patches in (self._late, self._early):
            if patches is not None:
                patches.undo()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def check(self) -> None:
        """Put back what was lost, or stop the job.

        Raises:
            HookNotPlaced: a hook cannot be placed.
        """
        late = self._late
        lost = late.lost() if late is not None else []
        if late is not None and lost:
            log.warning("hooks were replaced by somebody else and are placed again: %s", ", ".join(sorted(lost)))
            late.place()

    # -- triggers ---------------------------------------------------------------------------------

    def _imported(self, module: ModuleType) -> None:
        if self._active:
            self._early.place_in(module.__name__)

    def _hook_process_group(self) -> Callable[[], None]:
        if importlib.util.find_spec("torch") is None:
            raise MissingExtra("torch", "megatron")
        importlib.import_module("torch.distributed")
        patches = Patches([Hook("torch.distributed", "init_process_group", self._trigger)])
        patches.place_in("torch.distributed")
        return patches.undo

    def _around_pretrain(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._place_late()
        return self.outermost(call, args, kwargs)

    def _trigger(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._place_late()
        return call(*args, **kwargs)

    def _place_late(self) -> None:
        """Only where Megatron's training is what runs: other users of torch.distributed are left alone."""
        if not self._active or _TRAINING not in sys.modules:
            return
        if self._late is None:
            self._late = Patches(self._make_late(self))
            self._undo.append(mindspeed.after_apply(self.check))
            self._late.place()
        else:
            self.check()


def _call(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return call(*args, **kwargs)


def _hooks(installation: Installation) -> list[Hook]:
    from lastgasp_megatron.hooks import Training

    training = Training(check=installation.check)
    installation.outermost = training.around_pretrain
    return training.hooks()
