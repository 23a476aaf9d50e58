"""What trust costs: a verified durable save, and verification before a load, against torch alone.

A restart has to know that a checkpoint is good on all ranks before any of them trains on it. In one pass a rank
verifies what it unpickles (`OnePass`); in two, as before, the file is read for its digests first, and loaded then.

The variants of one comparison take turns within each round, in changing order, so that a drifting disk hits
all of them; ratios are taken within a round. `cold` drops the file from the page cache before each run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness import Measure, Options, drop_cache, interleave, paired, timed, warm_cache
from lastgasp.checkpoint import Provenance, SingleFile, Staged, candidates, verify
from lastgasp.checkpoint.manifest import Fit
from lastgasp.pytorch.io import load_verified, save_verified, without_crc32
from lastgasp.pytorch.one_pass import OnePass

LAYOUT = SingleFile()
GIGABYTES, ROUNDS = 1.0, 9
TORCH_SAVE, TORCH_SAVE_NO_CRC, OUR_SAVE = "torch.save + fsync", "torch.save without CRC + fsync", "verified save"
TORCH_LOAD, OUR_LOAD, VERIFY = "torch.load", "verify + load", "verify alone"
ONE_PASS, TWO_PASSES = "in one pass", "in two passes, as before"


def measure(options: Options) -> list[Measure]:
    """Seconds of each, and the two ratios that have a target."""
    size, rounds = (0.01, 2) if options.quick else (GIGABYTES, ROUNDS)
    state, path = make_state(size), options.folder / "step-1.ckpt"
    saves = bench_save(state, path, rounds)
    save_lastgasp(state, path)
    del state
    measures = _measures(f"save {size:g} GB", saves)
    measures.append(paired(f"save {size:g} GB: verified / torch.save", saves, OUR_SAVE, TORCH_SAVE, 1.0))
    for temperature in ("cold", "warm"):
        loads = bench_load(path, rounds, cold=temperature == "cold")
        title = f"load {size:g} GB, {temperature}"
        measures += _measures(title, loads)
        measures.append(paired(f"{title}: verify + load / load", loads, OUR_LOAD, TORCH_LOAD, 1.3))
        restarts = bench_restart(path, rounds, cold=temperature == "cold")
        title = f"restart with {size:g} GB, {temperature}"
        measures += _measures(title, restarts)
        measures.append(paired(f"{title}: one pass / two", restarts, ONE_PASS, TWO_PASSES, 1.0))
    return measures


def _measures(title: str, samples: Mapping[str, list[float]]) -> list[Measure]:
    return [Measure(name=f"{title}: {name}", unit="s", samples=seconds) for name, seconds in samples.items()]


def make_state(gigabytes: float) -> dict[str, torch.Tensor]:
    """A model-like state: 64 tensors of float32 that fill `gigabytes`."""
    count = int(gigabytes * 1e9 / 4 / 64)
    return {f"layer{number}.weight": torch.randn(count) for number in range(64)}


def save_plain(state: dict[str, torch.Tensor], path: Path) -> None:
    """torch.save and fsync: durable, not atomic, not verifiable."""
    torch.save(state, path)
    _sync(path)


def save_plain_without_crc(state: dict[str, torch.Tensor], path: Path) -> None:
    """As above without torch's CRC-32."""
    with without_crc32():
        save_plain(state, path)


def save_lastgasp(state: dict[str, torch.Tensor], path: Path) -> None:
    """Verified, atomic and durable."""
    with Staged(path, LAYOUT) as staged:
        save_verified(state, staged)
        staged.publish(Provenance(format="torch", step=1, kind="periodic", job="bench"))


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def bench_save(state: dict[str, torch.Tensor], path: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds per save; old files are removed before each run."""

    def clean() -> None:
        for old in path.parent.glob(f"{path.name}*"):
            old.unlink()
        os.sync()

    saves = {TORCH_SAVE: save_plain, TORCH_SAVE_NO_CRC: save_plain_without_crc, OUR_SAVE: save_lastgasp}
    variants = {name: partial(timed, partial(save, state, path)) for name, save in saves.items()}
    return interleave(variants, rounds, clean)


def bench_load(path: Path, rounds: int, cold: bool) -> dict[str, list[float]]:
    """Seconds per load."""
    loads: dict[str, Callable[[Path], object]] = {
        TORCH_LOAD: torch.load,
        OUR_LOAD: load_verified,
        VERIFY: partial(verify, layout=LAYOUT),
    }
    variants = {name: partial(timed, partial(load, path)) for name, load in loads.items()}
    return interleave(variants, rounds, partial(drop_cache if cold else warm_cache, path))


def bench_restart(path: Path, rounds: int, cold: bool) -> dict[str, list[float]]:
    """Seconds until one rank knows that the file is good, and has loaded it."""
    [candidate] = candidates([path.parent], LAYOUT)

    def in_one_pass() -> object:
        preload = OnePass(Fit(number=0))
        assert preload.verdict(candidate, partial(verify, path, LAYOUT)).ok
        return preload.take(path)

    def in_two() -> object:
        assert verify(path, LAYOUT).ok
        return load_verified(path)

    variants = {name: partial(timed, way) for name, way in ((ONE_PASS, in_one_pass), (TWO_PASSES, in_two))}
    return interleave(variants, rounds, partial(drop_cache if cold else warm_cache, path))
