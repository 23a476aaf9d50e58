"""Ranks, hosts, and which rank holds which shard of the state."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from .errors import ConfigError

ReplicaGroups = tuple[tuple[int, ...], ...]
"""One tuple per shard: the ranks that hold a complete, equal copy of it, in order of preference."""
UNNAMED = "none"
"""What torch calls each job whose user gave no `--rdzv-id`, unless it invents a name (`--standalone`)."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of one rank in its job.

    Attributes:
        rank, world_size: as in torch.distributed.
        replicas: one group per shard of the state; plain data parallel is a single group of all ranks.
        attempt: how often the launcher has restarted the job (0 at first).
        job: the same string on all ranks and for all attempts, and another one for another job in this directory.
        incarnation: how often the ranks of this attempt have entered their training again in place.
        since_ns: when the launchers began with the first attempt, ns since the epoch, by the clock that is ahead of the
            others': another job of the same name has saved what is older. 0 where that is not known, or where no other
            job has this name (MindCluster's).
        began_ns: the same, or else when rank 0 began; equal on all ranks. 0: not known.
    """

    rank: int
    world_size: int
    replicas: ReplicaGroups
    attempt: int = 0
    job: str = "local"
    incarnation: int = 0
    since_ns: int = 0
    began_ns: int = 0

    @property
    def restarted(self) -> bool:
        """The job has trained before: in other processes, or in this one."""
        return self.attempt > 0 or self.incarnation > 0

    def __post_init__(self) -> None:
        remedy = "Fix the launcher's environment (RANK, WORLD_SIZE)."
        if self.world_size < 1:
            raise ConfigError("world_size", self.world_size, "at least 1", remedy)
        if not 0 <= self.rank < self.world_size:
            raise ConfigError("rank", self.rank, f"0 to {self.world_size - 1}", remedy)
        if self.attempt < 0:
            raise ConfigError("attempt", self.attempt, "at least 0", "Fix LASTGASP_ATTEMPT.")
        check_replicas(self.replicas, self.world_size)


def data_parallel(world_size: int) -> ReplicaGroups:
    """Return the groups of plain data parallelism: every rank holds everything."""
    return (tuple(range(world_size)),)


def check_replicas(replicas: ReplicaGroups, world_size: int) -> None:
    """Refuse groups that are empty, or name a rank twice or an unknown rank.

    Raises:
        ConfigError: with the group that is wrong.
    """
    for group in replicas:
        if not group or len(set(group)) != len(group) or not all(0 <= r < world_size for r in group):
            raise ConfigError(
                "replicas", group, f"distinct ranks from 0 to {world_size - 1}", "Fix the adapter's topology."
            )
    if not replicas:
        raise ConfigError("replicas", replicas, "at least one group", "Fix the adapter's topology.")


def host_identity() -> str:
    """Return an id shared by all processes that see each other in /proc: boot id, or host name, and pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # sandboxes such as gVisor have no such file
        boot = socket.gethostname()
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        space = 0
    return f"{boot}:{space}"
