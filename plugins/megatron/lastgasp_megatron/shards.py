"""The distributed optimizer's state: this rank's slice, and how the slices of live holders are merged.

Each holder writes its slice to a file of the shared checkpoint directory; the holder of slice 0 waits for the others
and makes Megatron's own `distrib_optim.pt` of them (`merge`). No collective: any of the ranks may be missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from lastgasp.adapter import DeadlineExceeded, NotSaveable, Place, clock
from lastgasp.adapter.torch import without_crc32
from lastgasp_megatron.topology import Shard

Bucket = dict[str, Tensor]
Slice = list[dict[Any, list[Bucket]]]
"""Per buffer: (parameter dtype, gradient dtype) -> per bucket: "param" and the optimizer's tensors, fp32, 1-D."""

POLL = 0.002
"""Seconds between two checks for the slices of others."""


def state_keys(optimizer: Any) -> tuple[str, ...]:
    """The names of the tensors per parameter: fp32 weights first."""
    return ("param", *getattr(optimizer, "optimizer_state_keys", ("exp_avg", "exp_avg_sq")))


def slice_of(optimizer: Any, parts: int) -> Slice:
    """This rank's slice, copied to the CPU: what `get_parameter_state_dp_zero` would send to rank 0.

    Args:
        optimizer: a DistributedOptimizer; parts: ranks that share its state.

    Raises:
        NotSaveable: a part of the optimizer's state is missing.
    """
    keys = state_keys(optimizer)
    return [
        {
            kind: [
                _bucket(optimizer, keys, ranges, bucket.grad_data.numel() // parts)
                for ranges, bucket in zip(all_ranges, buffer.buckets, strict=True)
            ]
            for kind, all_ranges in kinds.items()
        }
        for kinds, buffer in zip(optimizer.gbuf_ranges, optimizer.buffers, strict=True)
    ]


def _bucket(optimizer: Any, keys: tuple[str, ...], ranges: Any, size: int) -> Bucket:
    found = {key: torch.empty(size, dtype=torch.float32, device="cpu") for key in keys}
    places = [where["gbuf_local"] for where in ranges["param_map"].values()]
    for start, end in _gaps([(place.start, place.end) for place in places], size):
        for row in found.values():
            row[start:end].zero_()
    for param, place in zip(ranges["param_map"], places, strict=True):
        tensors = _tensors(optimizer, param)
        more = [key for key, value in tensors.items() if key not in (*keys, "step") and isinstance(value, Tensor)]
        if more:
            raise NotSaveable(f"the optimizer holds {more[0]!r} for each parameter, which distrib_optim.pt has not")
        for key in keys:
            row = found[key][place.start : place.end]
            if key in tensors:
                row.copy_(tensors[key].detach().view(-1))
            elif optimizer.optimizer.state:
                raise NotSaveable(f"the optimizer has no {key!r} of one parameter, and has others")
            else:
                row.zero_()  # no update was made yet: that is what Adam begins with
    return found


def _gaps(ranges: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """What the ranges leave of `size` elements: padding."""
    ends = [0, *(end for _, end in sorted(ranges))]
    starts = [*(start for start, _ in sorted(ranges)), size]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


def _tensors(optimizer: Any, param: Any) -> dict[str, Tensor]:
    group, index = optimizer.model_param_group_index_map[param]
    main = optimizer.optimizer.param_groups[group]["params"][index]
    found: dict[str, Tensor] = {"param": main} | optimizer.optimizer.state.get(main, {})
    return found


class Exchange:
    """Where the slices of one gasp meet: a hidden folder of the checkpoint directory.

    Args:
        directory: the checkpoint directory, shared by all ranks.
    """

    def __init__(self, directory: Path, place: Place, shard: Shard, seconds: float) -> None:
        self._directory, self._shard, self._seconds = directory, shard, seconds
        self._job = f".gasp-{xxhash.xxh3_64_hexdigest(place.job.encode())}-"
        self._attempt = (place.attempt, place.incarnation)

    def folder(self, step: int) -> Path:
        """Of this job, attempt, incarnation and step: what lies there was written at this very state."""
        return self._directory / f"{self._job}{'.'.join(map(str, self._attempt))}-{step}"

    def clear_older(self) -> None:
        """Remove what earlier attempts and incarnations of this job left. Never raises."""
        with contextlib.suppress(OSError):
            for folder in self._directory.glob(f"{self._job}*"):
                attempt = folder.name.removeprefix(self._job).split("-")[0]
                if tuple(map(int, attempt.split("."))) < self._attempt:
                    shutil.rmtree(folder, ignore_errors=True)

    def put(self, step: int, found: Slice) -> int:
        """Write this rank's slice atomically; returns its bytes. Raises OSError."""
        path = self._path(step, self._shard.part)
        path.parent.mkdir(parents=True, exist_ok=True)
        temp = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
        with without_crc32():
            torch.save(found, temp)
        size = temp.stat().st_size
        temp.replace(path)
        return size

    def take(self, step: int, part: int, stopped: Callable[[], bool]) -> Slice:
        """The slice that another rank writes; waits for it.

        Raises:
            DeadlineExceeded: it did not come.
            NotSaveable: `stopped` became true meanwhile.
        """
        path, deadline = self._path(step, part), clock.monotonic() + self._seconds
        while clock.monotonic() < deadline:
            if stopped():
                raise NotSaveable(f"the save of step {step} was called off")
            with contextlib.suppress(FileNotFoundError):
                found: Slice = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
                return found
            time.sleep(POLL)
        raise DeadlineExceeded(
            f"{path.name} of step {step}", self._seconds, "Does its rank see the same checkpoint directory?"
        )

    def drop(self, step: int) -> None:
        """Remove this rank's slice. Never raises."""
        with contextlib.suppress(OSError):
            self._path(step, self._shard.part).unlink()
            self.folder(step).rmdir()

    def close(self, step: int) -> None:
        """The checkpoint is published: nobody needs the slices. Never raises."""
        shutil.rmtree(self.folder(step), ignore_errors=True)

    def _path(self, step: int, part: int) -> Path:
        return self.folder(step) / f"{self._shard.name}{part}.pt"
