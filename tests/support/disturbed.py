"""Jobs that are entered again: where a rank will be replaced, its fault comes once a warm process is ready."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lastgasp.testing.faults import read_log
from support.launchers import Running, running, until

READY = "a restart will fork its ranks from a warm process"


def warm_for(faults: str) -> str:
    """LASTGASP_WARM: its imports are for nothing where no fault is a signal, and nobody will be replaced."""
    return "auto" if "kind=sig" in faults else "off"


@contextmanager
def disturbed(folder: Path, command: list[str], faults: str, **variables: str) -> Iterator[Running]:
    """A job whose faults come once a warm process is ready, if it is to have one; it ends well.

    `rank=all`: both of two ranks.
    """
    directory = folder / "d"
    directory.mkdir(exist_ok=True)
    log = folder / "faults.log"
    environment = {"LASTGASP_LOG": "debug", "LASTGASP_WARM": warm_for(faults), "LASTGASP_FAULT_LOG": str(log)}
    if faults:
        environment["LASTGASP_FAULT"] = faults
    environment |= variables
    with running(folder, command, **environment) as [started]:
        if environment["LASTGASP_WARM"] == "auto":
            until(lambda: READY in started.output, "the warm process is ready")
        (directory / "go").touch()
        yield started
        assert started.code() == 0, started.output[-6000:]
    wanted = sum(1 + ("rank=all" in part) for part in faults.split(";") if part)
    assert len(read_log(log)) == wanted, started.output[-6000:]


def lines(directory: Path, rank: int, what: str) -> list[list[str]]:
    """What a rank has noted about itself."""
    return [line.split()[1:] for line in (directory / f"rank-{rank}").read_text().splitlines() if line.startswith(what)]
