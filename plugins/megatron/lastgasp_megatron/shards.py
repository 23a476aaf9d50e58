"""The distributed optimizer's state: this rank's slice, and how the slices of live holders are merged.

Each saver writes the slices that it holds to files of the shared checkpoint directory; the one of slice 0 waits for the
others and makes Megatron's own `distrib_optim.pt` of them (`merge`). No collective: any of the ranks may be missing.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from lastgasp.adapter import DeadlineExceeded, NotSaveable, Place, clock
from lastgasp.adapter.files import unique_temp
from lastgasp.adapter.torch import without_crc32

Bucket = dict[str, Tensor]
Slice = list[dict[Any, list[Bucket]]]
"""Per buffer: (parameter dtype, gradient dtype) -> per bucket: "param" and the optimizer's tensors, fp32, 1-D."""

POLL = 0.002
"""Seconds between two checks for the slices of others."""


def state_keys(optimizer: Any) -> tuple[str, ...]:
    """The names of the tensors per parameter: fp32 weights first."""
    return ("param", *getattr(optimizer, "optimizer_state_keys", ("exp_avg", "exp_avg_sq")))


@dataclass(frozen=True)
class Held:
    """What a rank holds of one bucket, where it lies: nothing is copied.

    Args:
        size: elements of the rank's part; keys: names of the tensors.
        pieces: begin and end within that part, and the tensors of one parameter.
    """

    size: int
    keys: tuple[str, ...]
    pieces: tuple[tuple[int, int, dict[str, Tensor]], ...]

    def rows(self) -> Bucket:
        """The part, copied to the CPU; padding and moments that do not exist yet are zero, which is how Adam begins."""
        found = {key: torch.empty(self.size, dtype=torch.float32, device="cpu") for key in self.keys}
        for start, end in _gaps([(start, end) for start, end, _ in self.pieces], self.size):
            for row in found.values():
                row[start:end].zero_()
        for start, end, tensors in self.pieces:
            for key, row in found.items():
                if key in tensors:
                    row[start:end].copy_(tensors[key].detach().view(-1))
                else:
                    row[start:end].zero_()
        return found


HeldSlice = list[dict[Any, list[Held]]]


def held_of(optimizer: Any, parts: int) -> HeldSlice:
    """This rank's slice: what `get_parameter_state_dp_zero` would send to rank 0.

    Args:
        optimizer: a DistributedOptimizer; parts: ranks that share its state.

    Raises:
        NotSaveable: a part of the optimizer's state is missing, or there is more than a checkpoint has place for.
    """
    keys = state_keys(optimizer)
    return [
        {
            kind: [
                Held(
                    bucket.grad_data.numel() // parts,
                    keys,
                    tuple(_pieces(optimizer, keys, ranges["param_map"])),
                )
                for ranges, bucket in zip(all_ranges, buffer.buckets, strict=True)
            ]
            for kind, all_ranges in kinds.items()
        }
        for kinds, buffer in zip(optimizer.gbuf_ranges, optimizer.buffers, strict=True)
    ]


def copied(held: HeldSlice) -> Slice:
    """The slice in memory of its own."""
    return [{kind: [bucket.rows() for bucket in buckets] for kind, buckets in kinds.items()} for kinds in held]


def _pieces(optimizer: Any, keys: tuple[str, ...], param_map: Any) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
    for param, where in param_map.items():
        tensors, place = _tensors(optimizer, param), where["gbuf_local"]
        more = [key for key, value in tensors.items() if key not in (*keys, "step") and isinstance(value, Tensor)]
        if more:
            raise NotSaveable(f"the optimizer holds {more[0]!r} for each parameter, which distrib_optim.pt has not")
        lacking = [key for key in keys if key not in tensors]
        if lacking and optimizer.optimizer.state:
            raise NotSaveable(f"the optimizer has no {lacking[0]!r} of one parameter, and has others")
        yield place.start, place.end, {key: tensors[key] for key in keys if key in tensors}


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
        seconds: how long a slice is waited for.
    """

    def __init__(self, directory: Path, place: Place, seconds: float) -> None:
        self._directory, self._seconds = directory, seconds
        self._job = f".gasp-{xxhash.xxh3_64_hexdigest(place.job.encode())}-"
        self._attempt = (place.attempt, place.incarnation)
        self._put: set[Path] = set()

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

    def put(self, step: int, name: str, found: Slice) -> int:
        """Write a slice atomically (`Shard.name` of its holder); returns its bytes. Raises OSError."""
        path = self._path(step, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        temp = unique_temp(path)
        with without_crc32():
            torch.save(found, temp)
        size = temp.stat().st_size
        temp.replace(path)
        self._put.add(path)
        return size

    def take(self, step: int, name: str, stopped: Callable[[], bool]) -> Slice:
        """The slice of that name, which another rank writes; waits for it.

        Raises:
            DeadlineExceeded: it did not come.
            NotSaveable: `stopped` became true meanwhile.
        """
        path, deadline = self._path(step, name), clock.monotonic() + self._seconds
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
        """Remove the slices that this rank has put there. Never raises."""
        folder = self.folder(step)
        for path in [path for path in self._put if path.parent == folder]:
            self._put.discard(path)
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()

    def close(self, step: int) -> None:
        """The checkpoint is published: nobody needs the slices. Never raises."""
        shutil.rmtree(self.folder(step), ignore_errors=True)

    def _path(self, step: int, name: str) -> Path:
        return self.folder(step) / f"{name}.pt"
