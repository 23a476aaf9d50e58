"""Training over several hosts whose arenas have copies on partner hosts, held at a step until the copies are there."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lastgasp import arena
from support.hosts import Host, network
from support.hosts_job import START, TORCH, HostsJob, Told, ranks_of
from support.megatron.job import PIPELINE, GptJob
from support.waiting import until

LIMIT = 200.0
"""Seconds for a job to end once the fault has happened, on a loaded machine; a lost host is seen after 13."""
STEPS, PACE, GATE, APART = 24, 0.02, 10, 4
LAST = GATE // APART * APART
"""The newest step at the gate that goes to the partner."""


@dataclass
class Training:
    """A job over several hosts, whose ranks wait behind step `GATE`; `LAST` has come to all partners."""

    hosts: dict[str, Host]
    job: HostsJob
    told: Told
    ranks: int
    script: Path = TORCH

    def lose(self, name: str, how: str) -> None:
        """A host, with its launcher and its ranks: "power" is silent, what is "killed" closes its connections."""
        victim = self.hosts[name]
        if how == "power":
            victim.power_off()
            return
        ranks = ranks_of(victim, self.script)
        for pid in ranks:  # none lives to answer that another one is gone
            os.kill(pid, signal.SIGSTOP)
        for pid in (self.job.launchers[name].pid, *ranks):  # nsenter would stop together with a stopped launcher
            os.kill(pid, signal.SIGKILL)


def copies(launcher: int) -> list[tuple[int, ...]]:
    """The steps in each of the copies that a launcher keeps for another host's ranks."""
    found = []
    for name in os.listdir(f"/proc/{launcher}/fd"):
        path = f"/proc/{launcher}/fd/{name}"
        try:
            if arena.NAME not in os.readlink(path):
                continue
            fd = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        known = arena.whose(fd)
        if known is not None and known[2]:
            found.append(arena.steps(fd, known[1]))
        os.close(fd)
    return sorted(set(found))


def taking_port(launcher: int) -> int:
    """Where a launcher without a controller takes copies: the only port at which it listens."""
    rows = [line.split() for line in Path(f"/proc/{launcher}/net/tcp").read_text().splitlines()[1:]]
    ours = {os.readlink(path) for path in Path(f"/proc/{launcher}/fd").iterdir() if path.is_symlink()}
    [port] = {int(row[1].split(":")[1], 16) for row in rows if row[3] == _LISTENS and f"socket:[{row[9]}]" in ours}
    return port


def arrived(launcher: int) -> bool:
    """All that can be sent at the gate has come."""
    return copies(launcher) == [(LAST, LAST - APART)]


@contextmanager
def training(
    folder: Path, ranks: int = 1, buddy: str = f"every {APART}", names: str = "ha hb", steps: int = STEPS
) -> Iterator[Training]:
    """Start a loop with `fully_shard`, and wait until it stands at the gate and the copies have arrived.

    Args:
        ranks: of each host; names: of the hosts, the first of which has the controller.
    """
    told = Told(folder / "d", "gasp-*.dcp")
    told.directory.mkdir()
    script: list[object] = [TORCH, "sharded", told.directory, steps, PACE]
    variables = _variables(buddy) | {"HOSTS_GATE": str(GATE)}
    with network(folder, *names.split()) as hosts:
        job = HostsJob(hosts, script, names.split()[0], ranks, _PATIENT, **variables)
        one = Training(hosts, job, told, ranks)
        with _at_the_gate(one, lambda: told.reached(GATE, ranks=len(hosts) * ranks), buddy != "off"):
            yield one


@contextmanager
def megatron(
    folder: Path, found: GptJob, ranks: int, names: str = "ha hb", copied: bool = True
) -> Iterator[tuple[Training, Path]]:
    """The same for Megatron; the path is of the file that opens the gate.

    Args:
        found: the job, of which the script, its arguments and its environment count; it ends behind `GATE`.
        copied: its shards go to partner hosts.
    """
    command, hold = found.command(), folder / "hold"
    hold.touch()  # of another gate
    found.losses_folder.mkdir()
    ours = ("PYTHONPATH", "OMP_NUM_THREADS")
    more = {name: value for name, value in found.environment().items() if name not in os.environ or name in ours}
    variables = _variables(f"every {APART}") | more | {"HOLD": str(hold), "HOLDS": str(GATE)}
    with network(folder, *names.split()) as hosts:
        options = (*_PATIENT, "--framework", "megatron")
        job = HostsJob(
            hosts, command[command.index(str(found.script)) :], names.split()[0], ranks, options, sys.executable,
            **variables,
        )  # fmt: skip
        one = Training(hosts, job, Told(found.checkpoints, "iter_*[0-9]"), ranks, found.script)

        def reached() -> None:
            with_loss = len(hosts) * ranks // (2 if PIPELINE in found.flags else 1)  # those of the last stage
            until(
                lambda: sum(iteration == GATE for _, iteration in found.losses()) == with_loss,
                f"iteration {GATE} has begun",
                START,
            )

        with _at_the_gate(one, reached, copied):
            yield one, hold.with_name(f"{hold.name}-{GATE}")


_LISTENS = "0A"
_PATIENT = ("--rdzv-conf", "join_timeout=200")


def _variables(buddy: str) -> dict[str, str]:
    return {"LASTGASP_ARENA": "every 1", "LASTGASP_BUDDY": buddy}


@contextmanager
def _at_the_gate(one: Training, reached: Callable[[], None], copied: bool) -> Iterator[None]:
    one.job.start()
    try:
        reached()
        for launcher in one.job.launchers.values() if copied else ():
            until(partial(arrived, launcher.pid), "the copies are there", START)
        yield
    except BaseException:
        print(one.job.output, one.told.saved(), *one.told.incidents(), sep="\n")
        raise
