"""A second fault at a chosen point of a recovery in place: when a process comes to that point, it or another one is
killed, or stopped."""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "TEST_SECOND_FAULT"
"""POINT,WHO,VICTIM: `WHO` is a rank or `launcher`, `VICTIM` is `self`, `launcher` or a rank; with `,stop` it hangs."""
HUNG = ",stop"
"""Behind `VICTIM`: it hangs."""
LIMITS = {"LASTGASP_HANG_TIMEOUT": "12", "LASTGASP_FINISH_TIMEOUT": "2"}
"""Of a job in which a rank hangs in a recovery."""
AFTER = "TEST_SECOND_AFTER"
"""A file: it is not the second fault before that is there."""
DEVICE = "TEST_DEVICE_FAULT"
"""What a device says in step 9 of rank 1 (`device_fault`)."""
LAUNCHER, FOLDER = "TEST_LAUNCHER", "TEST_FOLDER"
IN_RANK = {
    "stop": "lastgasp.pytorch.loop.led:Orders.stop",
    "clean": "lastgasp.pytorch.loop.led:Orders.clean",
    "rebuild": "lastgasp.pytorch.loop.joining:Meeting.rebuild",
    "rollback": "lastgasp.pytorch.loop.led:Orders.rollback",
    "joins": "lastgasp.backends.ascend.mindio.early:Early.joins",
    "taken in": "lastgasp.pytorch.loop.led:Led.takes_in",
    "resize": "lastgasp.pytorch.loop.led:Led.resize",
    "joining again": "lastgasp.session:Session.joins_again",
    "kept": "lastgasp.pytorch.loop.led:Led.keep",
    "step left": "lastgasp.adapter.run:AdapterRun.failed",
    "released": "lastgasp.pytorch.loop.again_here:AgainHere.keep",
    "state kept": "lastgasp.pytorch.loop.again:_enter_again",
    "joining": "lastgasp.pytorch.loop.again:forget_accelerate",
    "handover": "lastgasp.pytorch.loop.again_here:received",
    "state taken": "lastgasp.pytorch.loop.again_here:AgainHere.ready",
}
"""Points, and what is called there. The job itself tells of more."""
FROM_FILES = IN_RANK | {
    "writing": "lastgasp.backends.ascend.mindio.handlers:Handlers._write",
    "publishing": "lastgasp.backends.ascend.mindio.handlers:Handlers._publish",
    "kept": "lastgasp.pytorch.from_files:LedFromFiles.keep",
    "taken in": "lastgasp.pytorch.from_files:LedFromFiles.takes_in",
    "resize": "lastgasp.pytorch.from_files:LedFromFiles.resize",
    "let go": "lastgasp.pytorch.from_files:EnteredFromFiles.goes_on",
    "entered": "lastgasp_megatron.run:Run.choose",
}
"""The same, for a training that begins again with the checkpoint that was just saved."""
OF_TRAINER = FROM_FILES | {
    "gasp written": "lastgasp_transformers.state:write_checkpoint",
    "meets": "lastgasp.pytorch.from_files:EnteredFromFiles.meet",
    "entered": "lastgasp_transformers.run:Run.train",
}
"""The same of Hugging Face's Trainer."""
IN_LAUNCHER = {
    "verdict": "lastgasp.gasp.ladder:Ladder._carry_out",
    "fork": "lastgasp.launch.in_place:InPlace._replace",
}
PATIENCE = 60.0


def install(directory: Path, points: dict[str, str] = IN_RANK) -> None:
    """Wrap what is called at the wanted point, if any."""
    wanted = os.environ.get(VARIABLE, "").split(",")[0]
    os.environ[FOLDER] = str(directory)
    if wanted in points:
        module, _, name = points[wanted].partition(":")
        __import__(module)
        *path, last = name.split(".")
        owner: Any = functools.reduce(getattr, path, sys.modules[module])
        setattr(owner, last, _after(functools.partial(at, wanted), getattr(owner, last)))


def _after(first: Callable[[], None], function: Any) -> Any:
    @functools.wraps(function)
    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return function(*args, **kwargs)

    return both


def at(point: str) -> None:
    """This process is there; nothing happens before the first fault, nor twice."""
    wanted, who, victim, *stops = (os.environ.get(VARIABLE) or ",,").split(",")
    if (point, os.environ.get("RANK", "launcher")) != (wanted, who):
        return
    directory = Path(os.environ[FOLDER])
    if not all(Path(os.environ[name]).exists() for name in ("LASTGASP_FAULT_LOG", AFTER) if name in os.environ):
        return
    try:
        os.close(os.open(directory / "second", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    pid = _pid(victim, directory)
    os.kill(pid, signal.SIGSTOP) if stops else kill(pid)


def stay(rank: str) -> None:
    """This rank stays here, as in code of the user's that does not come back; not after a recovery or a restart."""
    first = (os.environ["LASTGASP_ATTEMPT"], os.environ.get("LASTGASP_INCARNATION")) == ("0", None)
    if first and os.environ["RANK"] == rank:
        time.sleep(10 * PATIENCE)


def device_fault(step: int, text: str = os.environ.get(DEVICE, "")) -> None:
    """Raise once what a device says, in step 9 of rank 1."""
    again = os.environ.get("LASTGASP_INCARNATION"), os.environ.get("LASTGASP_ATTEMPT")
    if text and (step, os.environ["RANK"], *again) == (8, "1", None, "0"):
        Path(os.environ.get("LASTGASP_FAULT_LOG", os.devnull)).touch()  # the first fault: `at` brings the second
        raise RuntimeError(text)


def kill(pid: int) -> None:
    """And wait until it is dead."""
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while _lives(pid) and time.monotonic() < deadline:
        time.sleep(0.001)


def _pid(victim: str, directory: Path) -> int:
    if victim == "self":
        return os.getpid()
    if victim == "launcher":
        return int(os.environ[LAUNCHER])
    return int(re.findall(r"^entered (\d+)", (directory / f"rank-{victim}").read_text(), re.M)[-1])


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def note(directory: Path, text: str) -> None:
    """One line of this rank."""
    with (directory / f"rank-{os.environ['RANK']}").open("a") as file:
        file.write(text + "\n")


def main() -> None:
    """`lastgasp run`, with faults in the launcher: DIRECTORY, then its arguments."""
    directory = Path(sys.argv.pop(1))
    os.environ[LAUNCHER] = str(os.getpid())
    install(directory, IN_LAUNCHER)
    sys.argv[0] = "lastgasp"
    from lastgasp.cli import main as lastgasp

    lastgasp()


if __name__ == "__main__":
    main()
