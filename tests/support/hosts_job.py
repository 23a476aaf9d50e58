"""A job over the hosts of a test: one `lastgasp run` on each, and what the job says and leaves."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path

from lastgasp.checkpoint.manifest import Manifest, ManifestProblem, read
from lastgasp.events import Incident, decode_incident
from support import lean
from support.hosts import Host, Started
from support.waiting import until

START = 400.0
"""Seconds in which a job begins to train, on a machine that is loaded by other tests."""
SOON = 60.0
"""Seconds; see `saved_soon`."""
TESTS = Path(__file__).parents[1]
WORKER = TESTS / "support" / "hosts_worker.py"
TORCH = TESTS / "support" / "hosts_torch.py"
_NUMBER = re.compile(r"\d+")


class HostsJob:
    """Launchers by host; `endpoint` is the host that holds the rendezvous store.

    Args:
        script: a Python file and its arguments.
        options: of the launcher; python: its interpreter, by default that of Lightning jobs.
        nnodes: instead of the number of hosts; then the launcher is torchrun's own.
    """

    def __init__(
        self,
        hosts: dict[str, Host],
        script: Sequence[object],
        endpoint: str,
        ranks: int = 1,
        options: Sequence[str] = ("--rdzv-conf", "join_timeout=60"),
        python: str = "",
        nnodes: str = "",
        **variables: str,
    ) -> None:
        self.hosts = hosts
        launcher = ["torch.distributed.run"] if nnodes else ["lastgasp", "run"]
        nodes = ["--nnodes", nnodes or str(len(hosts)), "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
        where = ["--rdzv-id", "job", "--rdzv-endpoint", f"{endpoint}:29400", *options]
        self._command = [python or lean.python(), "-m", *launcher, *nodes, *where, *map(str, script)]
        paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
        self._variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "LASTGASP_TOKEN": uuid.uuid4().hex} | variables
        self.launchers: dict[str, Started] = {}

    def start(self, *names: str, **variables: str) -> None:
        """Start the launchers of these hosts, of all where none is named, with `variables` besides."""
        for name in names or self.hosts:
            self.launchers[name] = self.hosts[name].start(self._command, **self._variables | variables)

    def codes(self, seconds: float, *names: str) -> dict[str, int]:
        """The exit codes of these launchers, of all where none is named."""
        try:
            return {name: self.launchers[name].code(seconds) for name in names or self.launchers}
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.output}") from None

    @property
    def output(self) -> str:
        """What the launchers and their ranks have written."""
        return "\n".join(f"==== {name}\n{job.output[-6000:]}" for name, job in self.launchers.items())


class Told:
    """What ranks of `hosts_worker.py`, or of `hosts_torch.py`, have written into a directory."""

    def __init__(self, directory: Path, checkpoints: str = "step-*.toy") -> None:
        self.directory, self._checkpoints = directory, checkpoints

    def at(self, rank: int, attempt: int) -> int:
        """The step that a rank has completed, -1 where it has none."""
        try:
            return int((self.directory / f"at-{rank}-{attempt}").read_text() or -1)
        except FileNotFoundError:
            return -1

    def reached(self, step: int, attempt: int = 0, ranks: int = 2) -> None:
        """Wait until all ranks have completed `step`."""
        until(lambda: min(self.at(rank, attempt) for rank in range(ranks)) >= step, f"step {step} of {attempt}", START)

    def go(self) -> None:
        """Let the ranks pass their gate (HOSTS_GATE)."""
        (self.directory / "go").touch()

    def ends(self) -> dict[int, str]:
        """The final state of each rank that has ended well."""
        return {int(path.name.split("-")[1]): path.read_text() for path in self.directory.glob("end-*")}

    def saved(self) -> list[int]:
        """The steps that are saved."""
        return sorted(int(_NUMBER.findall(path.stem)[-1]) for path in self.directory.glob(self._checkpoints))

    def conflicts(self) -> list[str]:
        """Different states of one step; there must be none."""
        return sorted(path.name for path in self.directory.glob("*.conflict-*"))

    def incidents(self) -> list[Incident]:
        """All records, oldest first."""
        found = [decode_incident(path.read_bytes()) for path in (self.directory / "incidents").glob("*.json")]
        return sorted(found, key=lambda incident: incident.id)


class Commits:
    """Looks at a directory all the time, and remembers every manifest that has ever stood there, by step.

        with Commits(directory) as commits:
            ...
        assert commits.replaced() == []
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._over, self._lock = directory, threading.Event(), threading.Lock()
        self._seen: dict[tuple[str, int], str] = {}
        self._thread = threading.Thread(target=self._watch, name="commits")

    def __enter__(self) -> Commits:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self._look()

    def _look(self) -> None:
        with self._lock:
            for path in self._directory.glob("*.manifest.json"):
                with contextlib.suppress(FileNotFoundError):
                    key = (path.name, path.stat().st_ino)
                    if key not in self._seen:
                        manifest = read(path)
                        if isinstance(manifest, ManifestProblem) and manifest.kind == "missing":
                            continue  # it has gone meanwhile
                        assert isinstance(manifest, Manifest), manifest
                        self._seen[key] = f"{manifest.step} {manifest.self_digest}"

    @property
    def steps(self) -> list[int]:
        """Of all commits up to now."""
        self._look()
        return sorted(int(one.split()[0]) for one in set(self._seen.values()))

    def replaced(self) -> list[int]:
        """Steps of which there were two different commits; there must be none."""
        steps = self.steps
        return sorted({step for step in steps if steps.count(step) > 1})


def saved_soon(incident: Incident, lost_ns: int) -> bool:
    """Whether the step was durable soon after a host was lost, which the kernels of the others find after 13 s.

    About 14 s on a machine that is quiet; what is excluded here are the minutes that torch and TCP would take alone.
    """
    committed = incident.phases.committed
    return committed is not None and 0 < committed - lost_ns < SOON * 1_000_000_000


def expected(steps: int, world: int) -> dict[int, str]:
    """The final state of each rank of an undisturbed job of `hosts_worker.py`, computed here."""
    mask, state, generators = (1 << 64) - 1, 0, [1000 + rank for rank in range(world)]
    for _ in range(steps):
        generators = [(one * 6364136223846793005 + 1442695040888963407) & mask for one in generators]
        state = (state * 31 + sum(one >> 11 for one in generators)) & mask
    return {rank: f"{steps} {state:x} {one:x}" for rank, one in enumerate(generators)}


def ranks_of(host: Host, script: Path = WORKER) -> list[int]:
    """Process ids of the ranks that run on a host."""
    return [pid for pid, line in host.processes().items() if script.name in line and "lastgasp run" not in line]


__all__ = ["START", "TORCH", "WORKER", "Commits", "HostsJob", "Told", "expected", "ranks_of", "saved_soon"]
