"""`install()`: put the hooks in place, as late as possible, and keep them there (docs/facts/megatron.md §4).

Early, as soon as a module is imported: the option parser, what scripts have it do before they call `pretrain`, and
`pretrain` and `initialize_megatron` as triggers.
Late, when a trigger is called and all of MindSpeed's adaptors have run: everything else.
`torch.distributed.init_process_group` is another trigger, which nothing replaces.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import wrapt

from lastgasp.adapter import Around, Hook, Hooks, MissingExtra, Undo, switched, tell_launcher
from lastgasp_megatron import mindspeed
from lastgasp_megatron.args import around_parse_args
from lastgasp_megatron.lead import take_the_lead

log = logging.getLogger("lastgasp")

_TRAINING, _CORE = "megatron.training.training", "megatron.core.parallel_state"
_CORE_ALONE = (
    "process groups are made with megatron.core and without megatron.training: lastgasp protects what trains by the "
    "latter. After a fault of a loop of its own, of Megatron-Bridge or of NeMo nothing is saved (docs/megatron.md)"
)
HOMES = (
    "megatron.training.training",
    "megatron.training.checkpointing",
    "megatron.training.initialize",
    "megatron.training.arguments",
    "megatron.training.async_utils",
    "megatron.training",
    "mindspeed_llm.training.training",
    "mindspeed_llm.training.checkpointing",
    "mindspeed_llm.training.initialize",
    "mindspeed_llm.training.arguments",
    "mindspeed_llm.training",
)
"""Modules whose function of a hook's name is the hook's, even where it is one of their own."""

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
    wanted = switched()
    if multiprocessing.parent_process() is not None:
        return False
    if wanted is False:
        log.warning("lastgasp is off: LASTGASP=0")
        return False
    if take_the_lead(os.environ, sys.argv):
        log.info("lastgasp leads the job's recoveries: MindSpeed-LLM does not see the operator's HIGH_AVAILABILITY")
    if _installed is None:
        _installed = Installation()
        _installed.begin()
    return True


def uninstall() -> None:
    """Restore everything that is still wrapped by lastgasp. Idempotent."""
    global _installed
    installed, _installed = _installed, None
    if installed is not None:
        installed.undo()


def hooks_of(hooks: Iterable[Hook]) -> Hooks:
    """The keeper of these hooks; nothing is changed before its `place`."""
    return Hooks(hooks, remedy=_remedy, homes=HOMES, manager=mindspeed)


def _remedy() -> str:
    version = getattr(sys.modules.get("megatron.core"), "__version__", "of unknown version")
    return (
        f"This is megatron-core {version}, and lastgasp was written for core_v0.12.1 to 0.19.2. Install one of these "
        "or a newer lastgasp, or take lastgasp_megatron.install() out of the script to run without it."
    )


class Installation:
    """The hooks of one process.

    Args:
        late: what to wrap once a trigger is called; left out, the hooks of `lastgasp_megatron.hooks`.
    """

    def __init__(self, late: Callable[[Installation], list[Hook]] | None = None) -> None:
        self._make_late = late or _hooks
        self._early = hooks_of(
            [
                Hook("megatron.training.arguments", "parse_args", around_parse_args),
                Hook("megatron.training.checkpointing", "load_args_from_checkpoint", _around_load_args),
                Hook(_TRAINING, "pretrain", self._around_pretrain),
                Hook("megatron.training.initialize", "initialize_megatron", self._trigger),
                Hook("torch.distributed", "init_process_group", self._trigger),
            ]
        )
        self._late: Hooks | None = None
        self._told = False
        self._after_apply: Undo = _nothing
        self._active = False
        self.outermost: Around = _call
        """Called instead of `pretrain`; the late hooks set it."""

    def begin(self) -> None:
        """Wrap what is imported, and the rest when it is.

        Raises:
            MissingExtra: torch is not installed.
        """
        if importlib.util.find_spec("torch") is None:
            raise MissingExtra("torch", "megatron")
        importlib.import_module("torch.distributed")
        self._active = True
        for name in ("torch.distributed", *HOMES):
            wrapt.register_post_import_hook(self._imported, name)

    def undo(self) -> None:
        """Take everything back. Idempotent."""
        self._active = False
        for hooks in (self._late, self._early):
            if hooks is not None:
                hooks.undo()
        self._after_apply()
        self._after_apply = _nothing

    def check(self) -> None:
        """Place lost hooks again, or stop the job.

        Raises:
            HookNotPlaced: a hook cannot be placed.
        """
        late = self._late
        lost = late.lost() if late is not None else []
        if late is not None and lost:
            log.warning("hooks were replaced by other code and are placed again: %s", ", ".join(sorted(lost)))
            late.place()

    # -- triggers ---------------------------------------------------------------------------------

    def _imported(self, module: ModuleType) -> None:
        if self._active:
            self._early.place_in(module.__name__)

    def _around_pretrain(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._place_late()
        return self.outermost(call, args, kwargs)

    def _trigger(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._place_late()
        return call(*args, **kwargs)

    def _place_late(self) -> None:
        """Only where Megatron's training is what runs: other users of torch.distributed are left alone."""
        if not self._active:
            return
        if _TRAINING not in sys.modules:
            if _CORE in sys.modules and os.environ.get("RANK", "0") == "0" and not self._told:
                self._told = True
                log.warning("%s", _CORE_ALONE)
            return
        if self._late is None:
            self._late = hooks_of(self._make_late(self))
            self._after_apply = mindspeed.after_apply(self.check)
            self._late.place()
        else:
            self.check()


def _nothing() -> None:
    """There is nothing to restore."""


def _call(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return call(*args, **kwargs)


def _around_load_args(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from lastgasp_megatron.model_settings import around_load_args

    return around_load_args(call, args, kwargs)


def _hooks(installation: Installation) -> list[Hook]:
    from lastgasp_megatron.hooks import Training

    training = Training(check=installation.check)
    installation.outermost = training.around_pretrain
    return training.hooks()
