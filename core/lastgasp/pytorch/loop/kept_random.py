"""Random state as it is when a training function is called for the first time; each later call begins with it.

A function that divides its data at random, or makes layers outside of its session's state, does so again as before, and
as a new process would: ranks that stay and ranks that are replaced train alike.
"""

from __future__ import annotations

from typing import Any

import torch

from lastgasp.pytorch import rng


class KeptRandom:
    """That of Python, numpy, torch and the accelerators as they are now."""

    def __init__(self) -> None:
        self._devices = _accelerators()
        self._state, self._seed = rng.RngRecorder(self._devices).snapshot(), torch.initial_seed()

    def renew(self) -> None:
        """Have it again. An accelerator that nobody had used begins with the seed that it would have begun with."""
        for device in _accelerators():
            if device not in self._devices:
                rng.generator_of(device).manual_seed(self._seed)
        rng.restore(rng.decode(self._state), self._devices)


def _accelerators() -> list[torch.device]:
    """Those that are in use: to ask for the state of another one would begin its use."""
    found = []
    for name in ("cuda", "npu", "xpu"):
        module: Any = getattr(torch, name, None)
        if module is not None and hasattr(module, "is_initialized") and module.is_initialized():
            found += [torch.device(name, index) for index in range(module.device_count())]
    return found
