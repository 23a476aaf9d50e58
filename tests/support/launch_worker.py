"""A torch-free rank for launcher tests: steps with a Session, reports what it does in files, obeys `go` files.

Usage: launch_worker.py DIRECTORY MODE [MORE]. Its state is the number of its step. Modes:

train N     steps until N, then ends normally
die N       rank 1 kills itself after step N, in every attempt; resumes from what was saved
once N      rank 1 kills itself after step N of the first attempt; the second one ends normally two steps later
gated N     as once, but the first attempt waits after its first step for the file DIRECTORY/go
stuck N     N steps, then blocks in C until it is released
behind N    as train, then rank 1 ends with code 1, in every attempt
slain N     as train, then rank 1 kills itself, in every attempt
late N      the same, once the script has come to its end
export N    as train, then saves its result once the file DIRECTORY/go is there
refuse N    refuses to start, as what finds a wrong setting does; N is of no account
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from lastgasp import exitcodes
from lastgasp.config import GaspConfig
from lastgasp.gasp.rank_status import Released, exit_code
from lastgasp.session import Contact, Session
from lastgasp.topology import Place, data_parallel
from support.engine_worker import ToySource


def main() -> None:
    """One rank under torchrun's environment; it imports the module that LAUNCH_WORKER_IMPORT names."""
    if extra := os.environ.get("LAUNCH_WORKER_IMPORT"):
        importlib.import_module(extra)
    directory, mode, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = int(os.environ["LASTGASP_ATTEMPT"])
    gated = mode == "gated" and attempt == 0
    if mode in ("once", "gated"):
        mode, steps = ("die", steps) if attempt == 0 else ("train", steps + 2)
    tell(directory, rank, attempt)
    source = ToySource(rank, directory, {})
    place = Place(rank=rank, world_size=world, replicas=data_parallel(world), attempt=attempt)
    session = Session(GaspConfig.resolve(directory), place, source, Contact.from_environment())
    session.status.recovery = "save" if os.environ.get("LASTGASP_RECOVERY") == "save" else ""
    session.gather("start", b"")
    if mode == "refuse":
        sys.exit(exitcodes.REFUSED)
    session.take_sigterm()
    begin = newest(directory)
    steps = begin + 1 if mode == "raise" else steps
    session.training_started(begin, begin)
    try:
        for step in range(begin + 1, steps + 1):
            session.before_update()
            source.note(step)
            session.step_completed(step)
            while gated and not (directory / "go").exists():
                time.sleep(0.02)
        (directory / f"stepped-{rank}-{attempt}").touch()
        finish(session, mode, rank)
    except Released as released:
        sys.exit(exit_code(released.outcome))


def finish(session: Session, mode: str, rank: int) -> None:
    """What comes after the last step."""
    if mode in ("train", "export", "behind", "slain", "late"):
        if mode == "late" and rank == 1:
            atexit.register(os.kill, os.getpid(), signal.SIGKILL)
            atexit.register(time.sleep, 1)  # the other one has ended by then
        session.close()
        if rank == 1 and mode in ("behind", "slain"):
            sys.exit(1) if mode == "behind" else os.kill(os.getpid(), signal.SIGKILL)
        if mode == "export":
            export(session.config.directory, rank)
        return
    if mode == "raise":
        session.gather("about to raise", b"")
        if rank == 1:
            session.fault("exception", f"OSError: the log of step {session.status.step} cannot be written")
            sys.exit(1)
    if mode == "die" and rank == 1:
        session.gather("about to die", b"")  # so that all are at the same step
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "die":
        session.gather("about to die", b"")
    session.progress("backward")
    threading.Event().wait()


def export(directory: Path, rank: int) -> None:
    """What a script does once its training is over."""
    (directory / f"exports-{rank}").touch()
    deadline = time.monotonic() + 120
    while not (directory / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    (directory / f"result-{rank}").touch()


def tell(directory: Path, rank: int, attempt: int) -> None:
    """This rank, and what the launcher gave it."""
    directory.mkdir(exist_ok=True)
    names = ("MASTER_PORT", "LASTGASP_CONTROLLER", "LASTGASP_LAUNCHER", "LASTGASP_JOB", "TORCHELASTIC_RUN_ID")
    found = {"pid": os.getpid()} | {name: os.environ.get(name) for name in names}
    temp = directory / f".rank-{rank}-{attempt}"
    temp.write_text(json.dumps(found))
    temp.rename(directory / f"rank-{rank}-{attempt}")


def newest(directory: Path) -> int:
    """The newest step that was saved."""
    return max((int(path.stem.split("-")[1]) for path in directory.glob("step-*.toy")), default=0)


if __name__ == "__main__":
    main()
