"""Faults inside a real Megatron loop: fires `lastgasp.testing.faults` at each phase, where `LASTGASP_FAULT` asks.

data: the iteration begins. forward: in a module in the middle of the model; validation: the same in an evaluation.
backward: before the gradients are reduced. before_update: when they are, and `optimizer.step` begins. update: inside
the inner optimizer's step, before it changes anything; of two, inside the second's. after_update: between the inner
step and the all-gather of the parameters. step_end: when `optimizer.step` has returned. periodic_save: on a rank that
writes within `torch.save`, when the first bytes are written; on the others when the save begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from lastgasp.adapter import Undo
from lastgasp.adapter.testing import FaultKit, FaultyArchive, install, kit_from_env
from lastgasp_megatron.steps import parts_of, wrap


def install_faults(model: Any, optimizer: Any) -> Undo:
    """Arm the faults of `LASTGASP_FAULT`; returns the undo. Call after the state's own hooks are in place.

    Raises:
        ConfigError: `LASTGASP_FAULT` is malformed.
    """
    kit = kit_from_env()
    if kit is None:
        return lambda: None
    install(kit)
    return _Faults(kit, list(model), optimizer).undo


class _Faults:
    def __init__(self, kit: FaultKit, model: list[Any], optimizer: Any) -> None:
        self._kit, self._stack = kit, ExitStack()
        self.undo: Undo = self._stack.close
        self._stack.callback(install, None)
        for chunk in model:
            self._before(chunk, "zero_grad_buffer", "data")
            self._before(chunk, "finish_grad_sync", "backward")
        inner = [module for module in model[0].modules() if any(True for _ in module.parameters(recurse=False))]
        self._stack.callback(inner[len(inner) // 2].register_forward_hook(self._in_forward).remove)
        self._before(optimizer, "step", "before_update")
        self._after(optimizer, "step", "step_end")
        self._watch_inner([one.optimizer for one in parts_of(optimizer)])
        self._watch_saves()

    def _fire(self, phase: str) -> None:
        from megatron.training import get_args

        self._kit.fire_at(phase, int(get_args().curr_iteration))

    def _in_forward(self, module: Any, inputs: Any, output: Any) -> None:
        self._fire("forward" if module.training else "validation")

    def _before(self, owner: Any, name: str, phase: str) -> None:
        def around(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            self._fire(phase)
            return original(*args, **kwargs)

        self._stack.callback(wrap(owner, name, around))

    def _after(self, owner: Any, name: str, phase: str) -> None:
        def around(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._fire(phase)
            return result

        self._stack.callback(wrap(owner, name, around))

    def _watch_inner(self, inner: list[Any]) -> None:
        if not inner:
            return
        # torch calls it inside of `step`, and so behind the update gate.
        handle = inner[-1].register_step_pre_hook(lambda *args: self._fire("update"))
        self._stack.callback(handle.remove)
        self._after(inner[0], "step", "after_update")

    def _watch_saves(self) -> None:
        from megatron.core import parallel_state
        from megatron.training import checkpointing

        writes = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0

        def named(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            saves = bool(args[0])  # arenas ask for the name alone
            if saves and not writes and threading.current_thread() is threading.main_thread():
                self._kit.fire_at("periodic_save", int(args[1]))
            return original(*args, **kwargs)

        self._stack.callback(wrap(checkpointing, "get_checkpoint_name", named))
        if writes:
            self._stack.callback(wrap(torch.serialization, "_save", self._save))

    def _save(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return original(*args, **kwargs)
        from megatron.training import get_args

        step = int(get_args().curr_iteration) + 1
        return original(
            args[0], FaultyArchive(args[1], lambda: self._kit.fire_at("periodic_save", step)), *args[2:], **kwargs
        )
