"""Restarts from a warm process: when there is one, what it prepares, and why a restart has to do without.

Once a job has completed its first step, its first rank reports what it has imported (`gasp.imported`). The launcher
then starts a process that imports the same, and has the ranks of the next attempt forked from it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from lastgasp import _clock
from lastgasp.errors import ConfigError
from lastgasp.gasp.imported import VARIABLE, Imported
from lastgasp.launch.forked import ForkedProcess
from lastgasp.launch.matplotlib_folder import MatplotlibFolder
from lastgasp.launch.warm_checks import AT_LOADING, changed_since, times
from lastgasp.launch.warm_process import NoFork, WarmProcess, order_for
from lastgasp.memory_file import memory_file

log = logging.getLogger("lastgasp.launch")

SWITCH = "LASTGASP_WARM"
WITHOUT_DEVICE = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""For the imports: modules that ask torch for a GPU (torch.utils.cpp_extension does) would initialize CUDA, after which
no fork can use it. Asked through NVML torch leaves it alone."""
NOT_YET = "no rank has completed a step that long before"


@dataclass(frozen=True)
class Ranks:
    """How the ranks of this host are started.

    Attributes:
        command: of the first one: executable, -u, script or -m module, arguments.
        environments: what each gets on top of the launcher's own environment; also what it alone must get.
    """

    command: Sequence[str]
    environments: Sequence[Mapping[str, str]]

    def cannot(self) -> str:
        """Why they cannot be forked, or empty."""
        if len(self.command) < 3 or self.command[1] != "-u":
            return "the ranks are not Python scripts"
        script = self.command[2]
        if script == "-m":
            return "" if len(self.command) > 3 else "no module is named"
        return "" if os.path.isfile(script) and not script.endswith(".pyc") else f"{script} is not a Python source file"

    def own(self) -> set[str]:
        """Names of variables that a rank may have its own value of: torchrun sets them, whatever stands there now."""
        given = {(name, value) for one in self.environments for name, value in one.items()}
        return {name for name, value in given if not name.startswith(AT_LOADING) or os.environ.get(name) != value}


@dataclass
class Start:
    """How the ranks of one attempt were started on this host."""

    forked: int = 0
    spawned: int = 0
    why: str = ""

    def __str__(self) -> str:
        """For people: warm, or cold and why."""
        if not self.spawned:
            return "warm"
        return f"cold: {self.why}" if not self.forked else f"{self.forked} ranks warm, {self.spawned} cold: {self.why}"


@dataclass
class Warm:
    """One per launcher; all of it is called on its main thread. Close it when the job ends.

    Attributes:
        refused: why `fork` has returned None last.

    Raises (constructor):
        ConfigError: LASTGASP_WARM.
    """

    why: str = field(default_factory=lambda: "" if enabled(os.environ) else f"{SWITCH}=off")
    start: Start = field(default_factory=Start)
    refused: str = ""
    _process: WarmProcess | None = None
    _file: int = field(default_factory=lambda: memory_file("lastgasp-imported"))
    _begun: float = 0.0
    _lost: str = ""
    _changed: str = ""
    _matplotlib: MatplotlibFolder = field(default_factory=MatplotlibFolder)
    _known: dict[str, int] = field(default_factory=dict)
    """When the user's files were changed that the ranks had imported."""

    def begin(self) -> dict[str, str]:
        """Ranks are about to be started. Returns what their environment needs."""
        self.start = Start()
        if self.why or self._process is not None:
            return {VARIABLE: ""} | self._matplotlib.variables()
        os.ftruncate(self._file, 0)
        return {VARIABLE: f"/proc/{os.getpid()}/fd/{self._file}"} | self._matplotlib.variables()

    def look(self, ranks: Ranks) -> None:
        """Between two looks at the workers: start the process once it is known what to import, see that it is ready."""
        if self.why:
            return
        try:
            if self._process is not None:
                self._see(self._process)
            elif (found := self._reported()) is not None:
                self._prepare(ranks, found)
        except (NoFork, OSError) as error:
            self._cannot(str(error))

    def fork(
        self, command: Sequence[str], environment: Mapping[str, str], streams: Sequence[int]
    ) -> ForkedProcess | None:
        """A rank, where it can be forked; None where it must be started as ever."""
        try:
            if self._process is None:
                raise NoFork(self.why or self._lost or NOT_YET)
            if why := Ranks(command, ()).cannot():
                raise NoFork(why)
            forked = self._process.fork(order_for(command, environment), streams)
        except (NoFork, OSError) as error:
            self.start.spawned += 1
            self.refused = str(error)
            self.start.why = self.start.why or self.refused
            self._forget_if_gone()
            return None
        self.start.forked += 1
        return forked

    @property
    def pid(self) -> int:
        """The warm process's id; 0 where there is none."""
        return self._process.pid if self._process is not None else 0

    @property
    def changed(self) -> str:
        """Which file has changed since the running ranks imported it, in words; a new rank would be another program.

        Where one has, `cannot_fork` says so from then on: nobody else gets a new process.
        """
        self._changed = changed_since(self._known)
        return self._changed

    @property
    def cannot_fork(self) -> str:
        """Why no rank can be forked now; empty where it can."""
        if self._process is None or not self._process.ready:
            return f"there is no warm process ({self.why or self._lost or 'it is not ready yet'})"
        return self._changed

    def close(self) -> None:
        """End the process; idempotent. Its ranks are not harmed."""
        if self._process is not None:
            self._process.close()
            self._process = None
        self._matplotlib.close()
        self.why = self.why or "the job has ended"
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _reported(self) -> Imported | None:
        size = os.fstat(self._file).st_size
        line, end, _ = os.pread(self._file, size, 0).partition(b"\n") if size else (b"", b"", b"")
        try:
            return Imported.decoded(line) if end else None
        except ValueError as error:
            raise NoFork(f"what the ranks have imported cannot be read ({error})") from None

    def _prepare(self, ranks: Ranks, found: Imported) -> None:
        if why := ranks.cannot():
            raise NoFork(why)
        own = ranks.own()
        environment = WITHOUT_DEVICE | {name: value for name, value in os.environ.items() if name not in own}
        plan = msgspec.to_builtins(found) | {"own": sorted(own), "command": list(ranks.command)}
        self._begun, self._known, self._changed = _clock.monotonic(), times(found.modules), ""
        self._process = WarmProcess(ranks.command, environment, plan)

    def _see(self, process: WarmProcess) -> None:
        if process.ready:
            self._forget_if_gone()
        elif (memory := process.look()) is not None:
            log.debug("a restart will fork its ranks from a warm process (%d MB, ready after %.1f s)",
                      memory / 1e6, _clock.monotonic() - self._begun)  # fmt: skip

    def _forget_if_gone(self) -> None:
        """The ranks of the next attempt report again what they have imported, and it is made anew."""
        if self._process is not None and (how := self._process.gone):
            self._lost, self._process = how, None
            os.ftruncate(self._file, 0)
            log.info("no lost rank gets a new process now, and the next restart will start its ranks anew: %s", how)

    def _cannot(self, why: str) -> None:
        """Give it up for this job."""
        log.info("a restart will start its ranks anew, not fork them from a warm process: %s", why)
        if self._process is not None:
            self._process.close()
            self._process = None
        self.why = why


def enabled(environ: Mapping[str, str]) -> bool:
    """As the user has it.

    Raises:
        ConfigError: the variable has another value.
    """
    value = environ.get(SWITCH) or "auto"
    if value not in ("auto", "off"):
        raise ConfigError(SWITCH, value, "auto or off", "Leave it out for auto.")
    return value == "auto"
