"""A machine as doctor sees it: a frozen value, inspected once, so that every check is a pure function of it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from lastgasp.backends import VARIABLE, choose_backend, in_taskd_job, is_drop_in
from lastgasp.errors import ConfigError
from lastgasp.launch.ascend import Machine as Found
from lastgasp.launch.ascend import prepare

Ring = Literal["compiled", "missing", "other version", "switched off"]
MINDIO_ITEMS: Final = ("TTP", "UCE", "ARF", "TSP", "HCCE")
TFT_ITEMS: Final = (*MINDIO_ITEMS, "TRE", "RSC")
"""Items of MS_ENABLE_TFT; the first ones drive MindIO (docs/facts/mindformers.md §3)."""
_LISTENING = "0A"


@dataclass(frozen=True, kw_only=True)
class Storage:
    """The checkpoint directory, probed by writing to it.

    Attributes:
        error: why nothing can be written there; empty where it can.
        silent_s: seconds in which it did not answer; 0 where it did.
        fsync_error: why fsync of a file or of the directory fails; empty where it works.
        kind, options: of the file system, as mounted.
        free: bytes that this user may still write.
        largest: bytes of the largest checkpoint there; 0 where there is none.
        clock_offset_s: the file system's clock minus this host's, seconds; None where it could not be told.
        save_s: seconds of the longest save in the directory's incident records; None where there is none.
    """

    error: str = ""
    silent_s: float = 0.0
    fsync_error: str = ""
    kind: str = ""
    options: tuple[str, ...] = ()
    free: int = 0
    largest: int = 0
    clock_offset_s: float | None = None
    save_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What only the user knows about the job; None or empty if not given.

    Attributes:
        dp_size: ranks of the data-parallel group.
        replicas: copies of each shard of the optimizer.
        save_s: seconds that a save takes.
        tls_info: MindIO's `tls_info` string.
    """

    dp_size: int | None = None
    replicas: int | None = None
    save_s: float | None = None
    tls_info: str = ""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine, one user, one environment.

    Attributes:
        root: where /proc, /user and /dev stand; tests bring their own.
        cwd: the working directory.
        env: the environment as Python has it.
        exec_env: the environment that this process was started with; None where it cannot be read.
        umask: of this process; uid: its user.
        versions: of the distributions of `look.DISTRIBUTIONS` that are installed.
        places: where packages of `look.PACKAGES` lie that could be imported.
        ring: what writes step marks.
        directory: the checkpoint directory's name; empty where none was given.
        storage: what is there; None where none was given.
        found: libmspti.so and libtaskd.so, where `lastgasp run` would find them.
        shm: bytes of /dev/shm; None where there is none.
        clock_in_step: whether the kernel says that the clock is synchronised; None where it does not say.
        job: what the user stated.
        refused: values of lastgasp's own settings that a job would refuse here.
    """

    root: Path = Path("/")
    cwd: Path = Path("/")
    env: Mapping[str, str] = field(default_factory=dict)
    exec_env: Mapping[str, str] | None = None
    umask: int = 0o022
    uid: int = field(default_factory=os.geteuid)
    versions: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, Path] = field(default_factory=dict)
    ring: Ring = "compiled"
    directory: str = ""
    storage: Storage | None = None
    found: Found = field(default_factory=Found)
    shm: int | None = 1 << 40
    clock_in_step: bool | None = None
    job: JobFacts = JobFacts()
    refused: Sequence[ConfigError] = ()

    def at(self, path: str) -> Path:
        """A path as this machine has it: an absolute one below `root`, another below `cwd`."""
        return self.root / path.lstrip("/") if path.startswith("/") else self.cwd / path

    def has(self, distribution: str) -> bool:
        """Whether it is installed."""
        return distribution in self.versions

    def version(self, distribution: str) -> tuple[int, ...]:
        """The leading numbers of its version; empty where it is not installed."""
        found = re.match(r"\d+(\.\d+)*", self.versions.get(distribution, ""))
        return tuple(int(part) for part in found[0].split(".")) if found else ()

    @property
    def taskd(self) -> Path | None:
        """MindCluster's TaskD; None where there is none, or only PyPI's unrelated one."""
        place = self.places.get("taskd")
        return place if place is not None and is_mindcluster(place) else None

    @property
    def mindio(self) -> bool:
        """Whether MindIO TFT is installed, and not lastgasp's drop-in of its name."""
        place = self.places.get("mindio_ttp")
        return place is not None and not is_drop_in(place)

    @property
    def wanted(self) -> str:
        """Which backend the user wants: embedded, ascend or auto."""
        return (self.env.get(VARIABLE) or "auto").strip().lower()

    @property
    def in_mindcluster(self) -> bool:
        """Whether this is a pod of MindCluster's, or is set up like one, and nobody has ruled that out."""
        return self.wanted != "embedded" and (self.taskd is not None or bool(self.env.get("MINDX_TASK_ID")))

    @property
    def taskd_job(self) -> bool:
        """Whether workers register with TaskD here."""
        return self.in_mindcluster and self.taskd is not None and bool(self.env.get("MINDX_TASK_ID"))

    @property
    def led_by_mindio(self) -> bool:
        """Whether MindIO would lead a job's recoveries here."""
        return self.mindio and (self.wanted == "ascend" or (self.wanted == "auto" and self.npus > 0))

    @property
    def tft(self) -> frozenset[str]:
        """Items of MS_ENABLE_TFT that are on, as MindSpore reads them: plain text (docs/facts/mindformers.md §3)."""
        text = self.env.get("MS_ENABLE_TFT", "")
        return frozenset(one for one in TFT_ITEMS if f"{one}:1" in text)

    @property
    def recovers(self) -> bool:
        """Whether the operator has configured that processes are recovered, or that they dump."""
        given = self.env.get("PROCESS_RECOVER") == "on" or bool(self.env.get("HIGH_AVAILABILITY"))
        return given or bool(self.tft & set(MINDIO_ITEMS))

    @property
    def npus(self) -> int:
        """NPUs that /dev shows."""
        return len(list((self.root / "dev").glob("davinci[0-9]*")))

    def is_listening(self, port: int) -> bool:
        """Whether some process listens on the TCP port."""
        return any(port in _listening(self.root / "proc/net" / name) for name in ("tcp", "tcp6"))


def under_run(machine: Machine) -> Machine:
    """The machine as the ranks of a job see it that `lastgasp run` has started: with the variables that it sets."""
    try:
        choice = choose_backend(machine.env, machine.places.get)
        if choice.backend == "embedded" and not in_taskd_job(choice, machine.env):
            return machine
        return replace(machine, env=prepare(machine.env, machine.found).environment(machine.env))
    except (ConfigError, OSError):  # reported by the check concerned
        return machine


def is_mindcluster(taskd: Path) -> bool:
    """Whether a package `taskd` is MindCluster's; PyPI's is a task runner (docs/facts/taskd.md §1)."""
    return (taskd / "python" / "cython_api").is_dir() and (taskd / "api").is_dir()


def _listening(table: Path) -> set[int]:
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return set()
    return {int(row[1].rpartition(":")[2], 16) for row in rows if len(row) > 3 and row[3] == _LISTENING}
