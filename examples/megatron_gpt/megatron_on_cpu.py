"""Lets the real `megatron.training` run on a CPU with gloo: call `apply` before megatron is imported.

Only what was found to be needed with megatron-core 0.19.2: `typing.override`, stubs for modules that import triton
unguarded, tensor factories and moves that name a GPU, dtype names, `torch.cuda` without a GPU, its random state, and
an Adam that keeps its step in the group as apex's does (Megatron's loading relies on it).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.utils.data.dataloader

CPU = torch.device("cpu")
_FACTORIES = "empty zeros ones full tensor as_tensor rand randn randint arange linspace eye randperm empty_strided"
_LIKE = "empty_like zeros_like ones_like full_like rand_like randn_like"
_METHODS = "new_empty new_zeros new_ones new_full new_tensor"
_STUBS = {
    "megatron.core.transformer.moe.ops.paged_stash": (),
    "megatron.core.ssm.ops.common.causal_conv1d_varlen": (),
    "megatron.core.ssm.ops.causal_conv1d_varlen": (),
    "megatron.core.ssm.ops.mamba2.batch_invariant_decode": (),
}


def apply() -> None:
    """Change this process for good. Children that torch_dist's saving starts need it too (they import the script)."""
    if not hasattr(typing, "override"):
        vars(typing)["override"] = lambda method: method
    for name in _STUBS:
        sys.modules[name] = _Stub(name)
    _factories()
    _moves()
    _cuda()
    _random()
    apply_to_wheel()


def apply_to_wheel() -> None:
    """What the wheel lacks by itself, on a GPU as well: apex, and the Makefile of its helpers. No compiler, either."""
    _no_compiler()
    sys.modules["apex.optimizers"] = _apex()  # and no apex itself: its layer norm is probed for by that name
    _helpers()


def _helpers() -> None:
    """The wheel has its C++ helpers built, and no Makefile, without which Megatron exits."""
    from megatron.core.datasets import utils

    if not Path(utils.__file__).with_name("Makefile").exists():
        vars(utils)["compile_helpers"] = lambda: None


class _Stub(ModuleType):
    """A module whose every name is a function that refuses."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _refuse


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("needs triton")


def _no_compiler() -> None:
    """Nothing is compiled here, and importing the compiler would take a second of each start."""

    def uncompiled(model: Any = None, **options: Any) -> Any:
        return model if model is not None else lambda function: function

    setattr(torch, "compile", uncompiled)  # noqa: B010
    for method in vars(torch.optim.Optimizer).values():
        inner = getattr(method, "__wrapped__", None)
        if inner is not None:  # torch._compile looks here before it imports torch._dynamo
            setattr(inner, "__dynamo_disable", inner)


def _always(value: Any) -> Callable[..., Any]:
    """A function of its own each time: torch._dynamo refuses one under two names."""
    return lambda *args, **kwargs: value


def _on_cpu(device: Any) -> Any:
    """`device`, or the CPU where it is a GPU."""
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    if isinstance(device, str) and device.startswith("cuda"):
        return CPU
    return CPU if isinstance(device, torch.device) and device.type == "cuda" else device


def _redirected(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return original(*args, **kwargs)

    return factory


def _factories() -> None:
    for name in (*_FACTORIES.split(), *_LIKE.split()):
        setattr(torch, name, _redirected(getattr(torch, name)))
    for name in _METHODS.split():
        setattr(torch.Tensor, name, _redirected(getattr(torch.Tensor, name)))


def _moves() -> None:
    to, kind = torch.Tensor.to, torch.Tensor.type

    def moved(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(_on_cpu(a) if isinstance(a, str | torch.device) else a for a in args)
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return to(self, *args, **kwargs)

    def named(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return kind(self, dtype, *args, **kwargs)
        return str(kind(self)).replace("torch.", "torch.cuda.")  # Megatron knows GPU names only

    changed: dict[str, Any] = {"to": moved, "type": named, "cuda": lambda self, *args, **kwargs: self}
    for name, method in changed.items():
        setattr(torch.Tensor, name, method)
    setattr(torch.nn.Module, "cuda", lambda self, *args, **kwargs: self)  # noqa: B010


class _Idle:
    """A stream or an event of a device that has always finished."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream_id = self.device_index = self.cuda_stream = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _always({"query": True, "elapsed_time": 0.0}.get(name))

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """As of a GPU's streams."""
        return 0, 0


def _block() -> Any:
    return lambda *args, **kwargs: contextlib.nullcontext()


def _idle(name: str) -> type:
    return type(name, (_Idle,), {})


class _Properties:
    """What Megatron asks about a GPU."""

    name, total_memory, multi_processor_count, major, minor = "cpu", 1 << 34, 1, 8, 0


def _cuda() -> None:
    cuda = torch.cuda
    idle = "synchronize empty_cache set_device set_stream init _lazy_init reset_peak_memory_stats ipc_collect"
    counts = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved utilization"
    changed: dict[str, Any] = {name: _always(None) for name in idle.split()}
    changed |= {name: _always(0) for name in counts.split()} | {name: _block() for name in ("stream", "device")}
    changed |= {"Stream": _idle("Stream"), "Event": _idle("Event")}
    changed |= {"current_stream": lambda *args: _Idle(), "default_stream": lambda *args: _Idle()}
    changed |= {"is_available": _always(True), "is_initialized": _always(True), "device_count": _always(1)}
    changed |= {"current_device": _always(CPU), "memory_stats": lambda *args, **kwargs: _Counts()}
    changed |= {"get_device_properties": _always(_Properties()), "get_device_capability": _always((8, 0))}
    changed |= {"get_device_name": _always("cpu"), "_lazy_call": lambda call, **kwargs: call()}
    for name, value in changed.items():
        setattr(cuda, name, value)
    for name in ("range_push", "range_pop"):
        setattr(cuda.nvtx, name, _always(None))


class _Counts(dict[str, int]):
    def __missing__(self, key: str) -> int:
        return 0


def _random() -> None:
    """The GPU's generator is the CPU's."""

    def get(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def put(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    changed = {"get_rng_state": get, "set_rng_state": put, "manual_seed": torch.manual_seed}
    for module in (torch.cuda, torch.cuda.random):
        for name, value in changed.items():
            setattr(module, name, value)
    setattr(torch.cuda, "default_generators", _Generators())  # noqa: B010
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)  # it misses a second generator
    # A loader draws a seed from the CPU's generator, which on a GPU is not the one that dropout draws from.
    loader: Any = torch.utils.data.dataloader._BaseDataLoaderIter
    loader.__init__ = _drawing_nothing(loader.__init__)


def _drawing_nothing(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> None:
        state = torch.get_rng_state()
        original(*args, **kwargs)
        torch.set_rng_state(state)

    return method


class _Generators:
    """Whatever the index."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator


def _apex() -> ModuleType:
    """apex.optimizers with the two names that Megatron imports."""
    apex = ModuleType("apex.optimizers")
    vars(apex).update(FusedAdam=FusedAdam, FusedSGD=torch.optim.SGD)
    return apex


class FusedAdam(torch.optim.Optimizer):
    """AdamW with the step in the group and no step in the state."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, **ignored: Any,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(group, param)

    def _update(self, group: dict[str, Any], param: torch.Tensor) -> None:
        state = self.state[param]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        grad, (one, two) = param.grad, group["betas"]
        assert grad is not None
        state["exp_avg"].mul_(one).add_(grad, alpha=1 - one)
        state["exp_avg_sq"].mul_(two).addcmul_(grad, grad, value=1 - two)
        root = (state["exp_avg_sq"] / (1 - two ** group["step"])).sqrt_().add_(group["eps"])
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - one ** group["step"]))
