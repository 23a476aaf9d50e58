"""The work of bench_arenas in a process of its own: one rank's shards of a given size, copied, written, read back.

One rank of a mesh of one: what a rank does for its own shard is the same whatever the number of ranks. Prints one JSON
object: for each way its samples, in seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.flash_checkpoint import FlashCheckpoint, version
from benchmarks.harness import drop_cache, interleave, timed
from lastgasp.adapter.sharded import Payload, Shards, fill
from lastgasp.arena import Arena, verified
from lastgasp.checkpoint import Provenance, Staged, verify
from lastgasp.pytorch.sharded import LAYOUT, load, write_arena, write_live
from lastgasp.pytorch.sharded_image import head_of
from lastgasp.pytorch.sharded_parts import merge, part_of

WIDTH = 2048
BYTES = 12
"""For each parameter, Adam's moments included."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of it lies here."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Bench:
    """A model, its optimizer, an arena that holds a step of it, and a directory that holds it."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        count = max(1, nbytes // BYTES // (WIDTH * WIDTH))
        width = WIDTH if nbytes >= BYTES * WIDTH * WIDTH else 64
        self.models = {"model": nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))}
        model: nn.Module = self.models["model"]
        for layer in model:  # type: ignore[attr-defined]
            fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        adam = torch.optim.Adam(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        adam.step()
        self.optimizers = {"optimizer": adam}
        self.shards = Shards(self.models, self.optimizers, 0, 1)
        self.groups = [[{k: v for k, v in group.items() if k != "params"} for group in adam.param_groups]]
        self.folder, self.numbers = folder, itertools.count(1)
        self.pieces = [head_of(b"", b"x"), *self.shards.payload(self.groups)]
        self.size = sum(memoryview(piece).nbytes for piece in self.pieces)
        self.arena = Arena()
        self.arena.reserve(self.size)
        self.plain = memoryview(mmap.mmap(-1, self.size))
        for _ in range(2):
            self.copy()
            self.memcpy()
        self.saved = self.save(self._live)

    # -- a copy -----------------------------------------------------------------------------------

    def copy(self) -> None:
        """Into the arena, with its digest."""
        self.arena.copy(1, self.pieces)

    def memcpy(self) -> None:
        """The same bytes into warm memory, piece by piece, and nothing else."""
        at = 0
        for each in self.pieces:
            piece = memoryview(each)
            self.plain[at : at + piece.nbytes] = piece.cast("B")
            at += piece.nbytes

    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's shards, by name."""
        found = {f"model.{name}": local(each) for name, each in self.models["model"].state_dict().items()}
        for number, state in self.optimizers["optimizer"].state_dict()["state"].items():
            found |= {f"optimizer.{number}.{name}": local(each) for name, each in state.items()}
        return found

    # -- durable files ----------------------------------------------------------------------------

    def save(self, write: Callable[[Staged], bytes]) -> Path:
        """A checkpoint with its digests and manifest, durable."""
        step = next(self.numbers)
        target = self.folder / f"gasp-step={step:08d}.dcp"
        with Staged(target, LAYOUT) as staged:
            own = part_of(staged, [write(staged)], {})
            merge(staged, own, {0: own}, {})
            staged.publish(Provenance(format="bench", step=step, kind="gasp", job="bench"))
        return target

    def _live(self, staged: Staged) -> bytes:
        return write_live(staged, self.shards, plain=True, groups=self.groups)

    def _arena(self, staged: Staged) -> bytes:
        with verified(self.arena.fd, self.arena.identity, 1) as payload:
            return write_arena(staged, Payload(payload).shards, plain=True, groups=self.groups)

    # -- torch's own, for comparison ----------------------------------------------------------------

    def dcp_save(self) -> float:
        """Seconds of `torch.distributed.checkpoint.save` of the same state; no digest, no fsync by default."""
        return self._dcp(lambda state, place: dcp.save(state, checkpoint_id=place))

    def dcp_async(self) -> float:
        """Seconds that training waits for its `async_save`, which copies on the training thread and writes later."""
        return self._dcp(lambda state, place: dcp.async_save(state, checkpoint_id=place))

    def _dcp(self, save: Callable[[Any, Path], Any]) -> float:
        place, kept = self.folder / "dcp", list[Any]()
        model, adam = self.models["model"], self.optimizers["optimizer"]
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, adam)}
        seconds = timed(lambda: kept.append(save(state, place)))
        if hasattr(kept[0], "result"):
            kept[0].result()
        shutil.rmtree(place)
        return seconds

    # -- back into the training -------------------------------------------------------------------

    def from_arena(self) -> None:
        """Verified, and then every tensor filled."""
        with verified(self.arena.fd, self.arena.identity, 1) as payload:
            fill(Payload(payload).shards, self.models, self.optimizers, rank=0, world_size=1)

    def ready_from_arena(self) -> None:
        """The same, and the arena goes on with that memory."""
        self.from_arena()
        successor = Arena()
        successor.adopt(os.dup(self.arena.fd), self.arena.identity, 1)
        successor.close()

    def from_files(self) -> None:
        """The same from a checkpoint: what a restart does without arenas."""
        verdict = verify(self.saved, LAYOUT)
        assert verdict.ok, verdict.reasons
        load(self.saved, self.models, self.optimizers)

    def ready_from_files(self) -> None:
        """The same, and there is an arena for the next copy."""
        self.from_files()
        arena = Arena()
        arena.reserve(self.size)
        arena.close()

    def measure(self, rounds: int) -> dict[str, Any]:
        """All of it; what is compared takes turns."""
        def cold(action: Callable[[], None]) -> Callable[[], float]:
            def measured() -> float:
                for path in self.saved.iterdir():
                    drop_cache(path)
                return timed(action)

            return measured

        found: dict[str, Any] = {"nbytes": self.size}
        copies = {"copy": partial(timed, self.copy), "memcpy": partial(timed, self.memcpy)}
        fills = {
            "from arena": partial(timed, self.from_arena), "from files, warm": partial(timed, self.from_files),
            "ready from arena": partial(timed, self.ready_from_arena),
            "ready from files, warm": partial(timed, self.ready_from_files),
        }  # fmt: skip
        if version():
            flash = FlashCheckpoint(self.folder, self.tensors())
            for _ in range(2):
                flash.save()
            copies["flash checkpoint"] = partial(timed, flash.save)
            fills["from flash checkpoint"] = partial(timed, flash.fill)
        found |= interleave(copies, rounds)
        saves = {"save live": self._live, "save arena": self._arena}
        variants: dict[str, Callable[[], float]] = {
            name: partial(self._saved, write) for name, write in saves.items()
        } | {"dcp save": self.dcp_save, "dcp async_save": self.dcp_async}
        found |= interleave(variants, rounds)
        self.from_files()  # O_DIRECT has left nothing of them in memory
        found |= interleave(fills, rounds)
        found |= interleave({"from files, cold": cold(self.from_files)}, rounds)
        if version():
            flash.close()
        return found

    def _saved(self, write: Callable[[Staged], bytes]) -> float:
        kept: list[Path] = []
        seconds = timed(lambda: kept.append(self.save(write)))
        for path in (*kept[0].iterdir(), LAYOUT.manifest_path(kept[0])):
            path.unlink()
        kept[0].rmdir()
        return seconds


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--mb", type=float, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("cpu:gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
        print(json.dumps(Bench(args.dir, int(args.mb * 1e6)).measure(args.rounds)), flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
