"""Selects the backend of a job, here only: the embedded engine or MindCluster's own packages.

Imports neither `backends.ascend` nor any package of MindCluster: checking whether they are installed takes a few file
system look-ups. (Importing `mindio_ttp` patches torchelastic, docs/facts/mindio_tft.md §1; importing
`taskd` makes a log directory, docs/facts/taskd.md §1.)
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal

from lastgasp.errors import ConfigError

VARIABLE = "LASTGASP_BACKEND"
WANTED = ("embedded", "ascend", "auto")
_NPU_DEVICES = Path("/dev")

Find = Callable[[str], Path | None]
"""Finds the location of an importable top-level package, or None."""
MINDIO_BESIDE = "mindio_ttp behind lastgasp-mindio's"
"""What `Find` is asked for where lastgasp-mindio's package was found: with MindCluster's beside it both refuse."""

_ended = list[str]()
"""Why MindIO leads no training of this process any more."""


@dataclass(frozen=True)
class Probe:
    """The result of looking for one package or device.

    Args:
        name: a package or device; found: whether it is there and valid; why: the reason, for people.
    """

    name: str
    found: bool
    why: str


@dataclass(frozen=True)
class BackendChoice:
    """The selected backend and the reasons; for the log, the incident record and `lastgasp doctor`.

    Attributes:
        backend: embedded or ascend.
        wanted: the value of `LASTGASP_BACKEND`.
        attempts: what was looked for, in order; empty if nothing had to be.
    """

    backend: str
    wanted: str
    attempts: tuple[Probe, ...] = ()

    def found(self, name: str) -> bool:
        """Whether `mindio_ttp`, `taskd`, ... was found."""
        return any(attempt.found for attempt in self.attempts if attempt.name == name)

    def brief(self) -> str:
        """The backend and the deciding reason, for the line at the start of a job."""
        missing = next((attempt for attempt in self.attempts if not attempt.found and attempt.name != "taskd"), None)
        if self.wanted == self.backend:
            return f"{self.backend} engine ({VARIABLE}={self.wanted})"
        if self.backend == "embedded" and missing is not None:
            return f"embedded engine ({missing.name}: {missing.why.partition(' (')[0]})"
        return f"{self.backend} engine"

    def describe(self) -> str:
        """One line."""
        tried = "; ".join(f"{attempt.name}: {attempt.why}" for attempt in self.attempts)
        return f"backend {self.backend} ({VARIABLE}={self.wanted}{'; ' if tried else ''}{tried})"


def choose_backend(environ: Mapping[str, str] | None = None, find: Find | None = None) -> BackendChoice:
    """Select by `LASTGASP_BACKEND`: embedded, ascend, or auto (the default), which is ascend if available.

    Args:
        environ: the environment; None for this process's. find: locates packages; None for the import system.

    Returns:
        The embedded engine, whatever is wanted, where MindIO has led an earlier training of this process.

    Raises:
        ConfigError: another value, or `ascend` although something it needs is missing; names everything missing.
    """
    env = os.environ if environ is None else environ
    wanted = (env.get(VARIABLE) or "auto").strip().lower()
    if wanted not in WANTED:
        raise ConfigError(VARIABLE, env.get(VARIABLE), f"one of {', '.join(WANTED)}", "Leave it out to have it chosen.")
    if wanted == "embedded":
        return BackendChoice("embedded", wanted)
    attempts = _look(env, find or installed, devices=wanted == "auto")
    needed = [attempt for attempt in attempts if attempt.name != "taskd"]
    choice = BackendChoice("ascend" if all(attempt.found for attempt in needed) else "embedded", wanted, attempts)
    if wanted == "ascend" and choice.backend != "ascend" and not _ended:
        missing = "; ".join(f"{attempt.name}: {attempt.why}" for attempt in needed if not attempt.found)
        raise ConfigError(
            VARIABLE, wanted, f"'embedded' here, because {missing}", "Install what is missing, or leave it out."
        )
    return choice


def mindio_ends() -> None:
    """MindIO has led a training of this process to its end: its processor, once destroyed, is not started again."""
    _ended[:] = ["it leads one training of a process, and has led it"]


def in_taskd_job(choice: BackendChoice, environ: Mapping[str, str]) -> bool:
    """Whether workers register with TaskD: it is installed, `embedded` was not set, and the job is TaskD's."""
    return choice.found("taskd") and bool(environ.get("MINDX_TASK_ID"))


def framework_of_taskd(modules: Mapping[str, object]) -> Literal["pt", "ms"]:
    """Return TaskD's name for the framework loaded by this process (docs/facts/taskd.md §1)."""
    return "ms" if "mindspore" in modules else "pt"


def _look(env: Mapping[str, str], find: Find, devices: bool) -> tuple[Probe, ...]:
    attempts = [_mindio(find)]
    if not attempts[0].found:
        return (*attempts, _taskd(find))  # the usual case costs only three look-ups
    if env.get("MINDIO_FOR_MINDSPORE", "").lower() in ("true", "1"):
        attempts.append(_package("mindspore", find, "needed with MINDIO_FOR_MINDSPORE=1"))
    else:
        attempts.append(_package("torch_npu", find, "mindio_ttp imports it, or set MINDIO_FOR_MINDSPORE=1"))
    if devices:
        attempts.append(_npu())
    return (*attempts, _taskd(find))


def _package(name: str, find: Find, what: str) -> Probe:
    place = find(name)
    return Probe(name, True, f"in {place}") if place is not None else Probe(name, False, f"not installed ({what})")


def _mindio(find: Find) -> Probe:
    if _ended:
        return Probe("mindio_ttp", False, _ended[0])
    place = find("mindio_ttp")
    if place is not None and is_drop_in(place):
        why = f"in {place} are its names on lastgasp (lastgasp-mindio), not MindCluster's"
        if (beside := find(MINDIO_BESIDE)) is not None:
            why = f"MindCluster's in {beside} and lastgasp-mindio's in {place}: neither can be imported, uninstall one"
        return Probe("mindio_ttp", False, why)
    return _package("mindio_ttp", find, "the wheel of MindCluster's MindIO TFT")


def _npu() -> Probe:
    cards = sorted(path.name for path in _NPU_DEVICES.glob("davinci[0-9]*"))
    if cards:
        return Probe("NPU", True, f"{len(cards)} in {_NPU_DEVICES}")
    return Probe("NPU", False, f"no {_NPU_DEVICES}/davinci* here ({VARIABLE}=ascend skips this check)")


def _taskd(find: Find) -> Probe:
    """PyPI has an unrelated `taskd` (a task runner); only MindCluster's counts."""
    place = find("taskd")
    if place is None:
        return Probe("taskd", False, "not installed")
    if is_drop_in(place):
        return Probe("taskd", False, f"in {place} are its names on lastgasp (lastgasp-taskd), not MindCluster's")
    if not (place / "python" / "cython_api").is_dir() or not (place / "api").is_dir():
        why = f"in {place} is the unrelated project of that name from PyPI, not MindCluster's: uninstall it"
        return Probe("taskd", False, why)
    return Probe("taskd", True, f"in {place}")


def is_drop_in(place: Path) -> bool:
    """Whether this package is lastgasp-taskd's or lastgasp-mindio's, which need nothing of MindCluster's."""
    return (place / "served-by-lastgasp").is_file() and not (place / "python" / "cython_api").is_dir()


def installed(name: str) -> Path | None:
    """Where the import system finds a package, or `MINDIO_BESIDE`; nothing is imported."""
    if name == MINDIO_BESIDE:
        places = (_in(entry, "mindio_ttp") for entry in sys.path)
        return next((place for place in places if place is not None and not is_drop_in(place)), None)
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    return Path(folders[0]) if folders else Path(spec.origin or name)


def _in(entry: str, name: str) -> Path | None:
    """A package in this entry of the path; a folder without `__init__.py` is none."""
    spec = PathFinder.find_spec(name, [entry])
    return Path(spec.origin).parent if spec is not None and spec.origin else None
