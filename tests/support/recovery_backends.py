"""The backends of the gasp as the contract suite sees them: what to set, and what must hold afterwards."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lastgasp.gasp import rundir

CONTRACT = Path(__file__).parents[1] / "contract"
SCALE = "0.2"
"""MindIO's seconds, shortened: 1.6 s to 2.4 s until a dead rank is noticed."""


@dataclass(frozen=True)
class Backend:
    """One of them.

    Args:
        mindspore: which mode of MindIO. real: the installed package, not the stand-in.
    """

    name: str
    mindspore: bool = False
    real: bool = False

    @property
    def mindio(self) -> bool:
        """MindIO leads."""
        return self.name != "embedded"

    def environment(self, directory: Path) -> dict[str, str]:
        """For the ranks, and for what they start."""
        if not self.mindio:
            return {"LASTGASP_BACKEND": "embedded"}
        found = {"LASTGASP_BACKEND": "ascend", "MINDIO_FOR_MINDSPORE": "1" if self.mindspore else "0"}
        found["TTP_LOG_PATH"] = str(directory / "logs")
        if self.real:
            return found
        folder = _only("mindspore" if self.mindspore else "torch_npu")
        path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        return found | {
            "PYTHONPATH": path,
            "MINDIO_STANDIN_SCALE": SCALE,
            "MINDIO_STANDIN_TRACE": str(directory / "trace"),
            "MINDIO_STANDIN_VIOLATIONS": str(directory / "violations"),
        }


def _only(framework: str) -> Path:
    """The stand-ins that are needed and no others: with `taskd` beside them the Session would register there.

    Beside the runtime directory of this run, and the same for all tests: so are the images that their ranks come from.
    """
    folder = Path(os.environ[rundir.VARIABLE]).with_name(f"standins-{framework}")
    folder.mkdir(exist_ok=True)
    inside = "ascend_standins_ms" if framework == "mindspore" else "ascend_standins"
    for name, place in (("mindio_ttp", "ascend_standins"), (framework, inside)):
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(CONTRACT / place / name)
    return folder


EMBEDDED = Backend("embedded")
TORCH = Backend("mindio-torch")
MINDSPORE = Backend("mindio-mindspore", mindspore=True)
REAL = Backend("mindio-real", real=True)
_no_mindio = pytest.mark.skipif(importlib.util.find_spec("mindio_ttp") is None, reason="mindio_ttp is not installed")
BACKENDS = [
    pytest.param(EMBEDDED, id="embedded"),
    pytest.param(TORCH, id="mindio-torch"),
    pytest.param(MINDSPORE, id="mindio-mindspore", marks=pytest.mark.full),
    pytest.param(REAL, id="mindio-real", marks=[pytest.mark.ascend, _no_mindio]),
]


LEADERS = [
    pytest.param(TORCH, id="stand-in"),
    pytest.param(REAL, id="real", marks=[pytest.mark.ascend, _no_mindio]),
]
"""What leads a job of torch's on Ascend."""


class Trace:
    """What the stand-in did in all processes, in order."""

    def __init__(self, directory: Path) -> None:
        self._path, self._violations = directory / "trace", directory / "violations"

    def events(self, name: str = "", rank: int | None = None) -> list[dict[str, Any]]:
        """All of them, or those of one name and rank."""
        text = self._path.read_text() if self._path.exists() else ""
        found = [json.loads(line) for line in text.split("\n")[:-1]]  # the last one may not be complete yet
        return [e for e in found if name in ("", e["event"]) and rank in (None, e["rank"])]

    def names(self, rank: int) -> list[str]:
        """The names of one rank's."""
        return [event["event"] for event in self.events(rank=rank)]

    def violations(self) -> str:
        """What broke MindIO's contract; empty where nothing did."""
        return self._violations.read_text() if self._violations.exists() else ""


@contextmanager
def used(backend: Backend, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trace]:
    """Set the environment; in the end no contract was broken, and the stand-in's controller is gone."""
    for name, value in backend.environment(directory).items():
        monkeypatch.setenv(name, value)
    trace = Trace(directory)
    try:
        yield trace
    finally:
        _end_controllers(directory)
    assert trace.violations() == ""


def _end_controllers(directory: Path) -> None:
    """MindIO's controller outlives its last rank by seconds: those that log into `directory` end now, real or not."""
    mark = f"TTP_LOG_PATH={directory / 'logs'}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            ours = b"mindio.controller" in (entry / "cmdline").read_bytes()
            if ours and mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue  # it has ended meanwhile, or is somebody else's
