"""The parts of a checkpoint: its files, its auxiliary states, and the files by which the framework finds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lastgasp.adapter import Layout
from lastgasp.adapter.mindspore import ITERATIONS, LEGACY, LegacyName
from lastgasp_mindformers.manifests import AUX_SUFFIX
from lastgasp_mindformers.tracker import NAME as TRACKER


@dataclass(frozen=True)
class Target:
    """Paths are POSIX, relative to the directory that holds the checkpoint.

    Attributes:
        name: the checkpoint's own; layout: of its files.
        aux: the file of all ranks' auxiliary states.
        markers: the framework's own files that name the newest checkpoint -> content.
        files: of each rank.
    """

    name: str
    layout: Layout
    aux: str
    markers: Mapping[str, bytes]
    files: Mapping[int, tuple[str, ...]]


def legacy_target(name: LegacyName, ranks: Iterable[int]) -> Target:
    """`rank_R/{prefix}_rank_R-{epoch}_{step}.{ext}` and `meta.json` for each rank."""
    ranks = tuple(ranks)
    return Target(name.name, LEGACY, name.aux, name.markers(ranks), {rank: (name.file(rank),) for rank in ranks})


def iteration_target(step: int, prefix: str | None, parts: Iterable[str]) -> Target:
    """`iteration_NNNNNNNN` of one process (docs/facts/mindformers.md §5).

    Args:
        prefix: CheckpointMonitor's; parts: "model", and "opt" where the optimizer is saved.
    """
    name, start = f"iteration_{step:08d}", f"{prefix}-" if prefix is not None else ""
    files = [f"{name}/{start}{part}-{0:07d}-{1:07d}.safetensors" for part in parts]
    files.append(f"{name}/common.json")
    return Target(name, ITERATIONS, f"{name}/{AUX_SUFFIX}", {TRACKER: str(step).encode()}, {0: tuple(files)})
