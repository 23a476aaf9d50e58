"""DLRover's flash checkpoint of the shards of `arena_state`, for comparison: into shared memory, and back from there.

Where it is installed: `pip install --no-deps --target FOLDER dlrover==0.6.1 psutil pynvml nvidia-ml-py deprecated
requests wrapt urllib3 idna certifi charset-normalizer`, the folder in PYTHONPATH. Its checkpointer for plain tensors
(`DdpCheckpointer`) gets the local shards, as its sharded one is for the first FSDP alone. It copies into one segment,
without a digest; a process that it starts keeps the segment.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import torch

NAME = "dlrover"


def version() -> str:
    """Of the installed one; empty where it is not."""
    return importlib.metadata.version(NAME) if importlib.util.find_spec(NAME) is not None else ""


class FlashCheckpoint:
    """What it keeps of these tensors."""

    def __init__(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        package = "dlrover.trainer.torch.flash_checkpoint"
        kind: Any = importlib.import_module(f"{package}.checkpointer").StorageType
        self._memory, self._folder, self._tensors = kind.MEMORY, folder / "flash", tensors
        checkpointer: Any = importlib.import_module(f"{package}.ddp").DdpCheckpointer
        self._made: Any = checkpointer(str(self._folder), comm_backend="gloo")
        self._step = 0

    def save(self) -> None:
        """Into shared memory."""
        self._step += 1
        path = str(self._folder / f"{self._step}.pt")
        self._made.save_checkpoint(self._step, {"shards": self._tensors}, path, storage_type=self._memory)
        if self._made._engine._cached_step != self._step:  # it passes over a save whose segment is in use
            raise RuntimeError(f"dlrover has not saved step {self._step}")

    def fill(self) -> None:
        """Every tensor from there."""
        step, state = self._made._engine.get_state_dict_from_memory()
        if step != self._step:
            raise RuntimeError(f"dlrover has step {step} in memory, not {self._step}")
        [held] = state.values()  # by the name of a file
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(held["shards"][name])

    def close(self) -> None:
        """End its process, and with it the segment."""
        saver = self._made._engine.saver_proc
        with contextlib.suppress(Exception):
            self._made._engine._shm_handler.unlink()
        if saver is not None:
            saver.terminate()
            saver.join(10.0)
