"""Decides from the environment what a job on Ascend needs around its processes; pure except for `look`.

Replaces what the documentation adds to train_start.sh and msrun_launcher.sh (docs/facts/taskd.md §1, §2, §5;
docs/facts/job_yaml.md §4; docs/facts/mindformers.md §9).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lastgasp.errors import ConfigError

PREPARED = "LASTGASP_PREPARED"
"""Set in the environment of a launcher that was re-executed with what `prepare` decided."""
DEFAULT_TTP_PORT = "8000"
"""MindCluster's samples have it (docs/facts/job_yaml.md §4)."""
RETRY = "L0:0, L1:1, L2:1"
"""HCCL_OP_RETRY_ENABLE for the strategy `retry` (docs/facts/job_yaml.md §8)."""
_TOOLKITS = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
_TOOLKIT_DEFAULTS = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")
"""Where CANN installs itself: before 8.5, and since."""
_NEED_MINDIO = ("TTP", "UCE", "ARF", "TSP", "HCCE")
"""Items of MS_ENABLE_TFT that drive MindIO (docs/facts/mindformers.md §3)."""
_HAND_OVER = (*_NEED_MINDIO, "RSC")
"""Items for which msrun leaves its workers to TaskD (the same section)."""


@dataclass(frozen=True)
class Machine:
    """What was found on this machine.

    Attributes:
        profiler: libmspti.so; taskd: libtaskd.so of the installed TaskD; empty where there is none.
    """

    profiler: str = ""
    taskd: str = ""


@dataclass(frozen=True)
class Setting:
    """One variable for the children, and why."""

    name: str
    value: str
    why: str


@dataclass(frozen=True)
class Prepared:
    """What `lastgasp run` sets up around the job.

    Attributes:
        settings: variables that differ from the environment.
        manager: whether to start TaskD's manager here.
        taskd_agent: whether TaskD's own agent must run torch's workers, since the manager restarts them.
        taskd_msrun: the same for MindSpore: msrun hands them to TaskD.
        proxy: whether to start TaskD's proxy here, since no agent of TaskD's does.
        notes: what the user should know.
    """

    settings: tuple[Setting, ...] = ()
    manager: bool = False
    taskd_agent: bool = False
    taskd_msrun: bool = False
    proxy: bool = False
    notes: tuple[str, ...] = field(default_factory=tuple)

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """`env` with the settings in it."""
        return dict(env) | {setting.name: setting.value for setting in self.settings}


@dataclass(frozen=True)
class _Job:
    """The operator's settings of the job in the environment."""

    strategies: frozenset[str]
    mindspore: bool
    first: bool
    handed_over: bool
    """Whether msrun leaves its workers to TaskD."""

    @property
    def recovers(self) -> bool:
        """Whether processes are recovered by MindIO, with any strategy."""
        return bool(self.strategies)


def prepare(env: Mapping[str, str], machine: Machine) -> Prepared:
    """Decide.

    Args:
        env: of the start script.

    Raises:
        ConfigError: what is set contradicts what the job asks for.
    """
    job = _job(env)
    _refuse_watchdogs(env, job)
    settings = [*_preload(env, machine), *_process_enable(env, job), *_addresses(env, job), *_watchdogs(env, job)]
    in_cluster = bool(env.get("MINDX_TASK_ID")) and bool(machine.taskd)
    agents = in_cluster and (job.handed_over if job.mindspore else job.recovers)
    return Prepared(
        settings=tuple(setting for setting in settings if env.get(setting.name) != setting.value),
        manager=in_cluster and job.first,
        taskd_agent=agents and not job.mindspore,
        taskd_msrun=agents and job.mindspore,
        proxy=in_cluster and not agents,
        notes=tuple(_notes(env, machine)),
    )


def _job(env: Mapping[str, str]) -> _Job:
    items = {item.strip() for item in env.get("HIGH_AVAILABILITY", "").split(",") if item.strip()}
    tft = set(re.findall(r"([A-Z]+):1", env.get("MS_ENABLE_TFT", "")))
    if env.get("PROCESS_RECOVER") == "on":
        items.add("recover")
    mindspore = bool(tft or env.get("MS_WORKER_NUM") or env.get("MS_ROLE"))
    first = _is_scheduler(env) if mindspore else env.get("RANK", "0") == "0"
    return _Job(frozenset(items | (tft & set(_NEED_MINDIO))), mindspore, first, bool(tft & set(_HAND_OVER)))


def _is_scheduler(env: Mapping[str, str]) -> bool:
    """Whether this is the pod where msrun's scheduler runs. A scheduler's own pod and the first worker's both have
    rank 0; only a job of one NPU has none (docs/facts/job_yaml.md §1)."""
    if env.get("MS_ROLE") == "MS_WORKER" and env.get("MS_WORKER_NUM", "1") != "1":
        return False
    return env.get("MS_ROLE") == "MS_SCHED" or env.get("MS_NODE_RANK", "0") == "0"


def _preload(env: Mapping[str, str], machine: Machine) -> Iterable[Setting]:
    found = [path for path in (machine.profiler, machine.taskd) if path]
    given = [path for path in re.split(r"[:\s]+", env.get("LD_PRELOAD", "")) if path]
    have = {Path(path).name for path in given}
    new = [path for path in found if Path(path).name not in have]
    if new:
        why = "the profiler and TaskD collect the steps' marks through these libraries"
        yield Setting("LD_PRELOAD", ":".join([*new, *given]), why)


def _process_enable(env: Mapping[str, str], job: _Job) -> Iterable[Setting]:
    if "TASKD_PROCESS_ENABLE" not in env and env.get("MINDX_TASK_ID"):
        why = "a strategy recovers processes" if job.recovers else "no strategy recovers processes"
        yield Setting("TASKD_PROCESS_ENABLE", "on" if job.recovers else "off", why)


def _addresses(env: Mapping[str, str], job: _Job) -> Iterable[Setting]:
    pod = env.get("POD_IP", "")
    if pod and job.first and not job.mindspore:
        yield Setting("MASTER_ADDR", pod, "ranks and TaskD's proxies reach the first pod by its address")
    if job.recovers and "TTP_PORT" not in env:
        yield Setting("TTP_PORT", DEFAULT_TTP_PORT, "the MindIO controller's port; it must be the same in all pods")
    if job.recovers and job.mindspore:
        host = env.get("MS_SCHED_HOST") or pod
        if host and "MS_TFT_IP" not in env:
            yield Setting("MS_TFT_IP", host, "MindSpore reaches the MindIO controller there")
        if "MS_TFT_PORT" not in env:
            yield Setting("MS_TFT_PORT", env.get("TTP_PORT", DEFAULT_TTP_PORT), "the same as TTP_PORT")


def _watchdogs(env: Mapping[str, str], job: _Job) -> Iterable[Setting]:
    if job.recovers and not job.mindspore and "HCCL_ASYNC_ERROR_HANDLING" not in env:
        yield Setting("HCCL_ASYNC_ERROR_HANDLING", "0", "the watchdog would end ranks that are to be repaired")
    if job.recovers and job.mindspore and "MS_ENABLE_THM" not in env:
        yield Setting("MS_ENABLE_THM", "{HCCL_WATCHDOG:0}", "the watchdog would end ranks that are to be repaired")
    if job.strategies & {"retry", "UCE", "HCCE"} and "HCCL_OP_RETRY_ENABLE" not in env:
        yield Setting("HCCL_OP_RETRY_ENABLE", RETRY, "links are retried before a rank is given up")


def _refuse_watchdogs(env: Mapping[str, str], job: _Job) -> None:
    value = env.get("HCCL_ASYNC_ERROR_HANDLING", "0")
    if job.recovers and not job.mindspore and value != "0":
        raise ConfigError(
            "HCCL_ASYNC_ERROR_HANDLING",
            value,
            f"0, as the job's strategies are {', '.join(sorted(job.strategies))}",
            "Take it out of the start script and the YAML: the watchdog ends ranks that are to be repaired.",
        )


def _notes(env: Mapping[str, str], machine: Machine) -> Iterable[str]:
    if not machine.profiler:
        yield "libmspti.so was not found, so TaskD's workers do not register: source CANN's set_env.sh before"
    if not machine.taskd:
        yield "libtaskd.so was not found: MindCluster's TaskD is not installed for this Python"
    if env.get("MINDX_TASK_ID") and not env.get("POD_IP"):
        yield "POD_IP is not set: add it to the YAML (`lastgasp job patch` does)"


def look(env: Mapping[str, str]) -> Machine:
    """Find what is installed here."""
    return Machine(profiler=_profiler(env), taskd=_taskd())


def _profiler(env: Mapping[str, str]) -> str:
    homes = [env[name] for name in _TOOLKITS if env.get(name)] + [*_TOOLKIT_DEFAULTS]
    folders = [Path(home, sub) for home in homes for sub in ("lib64", "tools/mspti/lib64")]
    folders += [Path(part) for part in env.get("LD_LIBRARY_PATH", "").split(":") if part]
    return next((str(folder / "libmspti.so") for folder in folders if os.path.isfile(folder / "libmspti.so")), "")


def _taskd() -> str:
    """libtaskd.so inside the installed package, which is not imported."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        spec = importlib.util.find_spec("taskd")
        for folder in spec.submodule_search_locations or () if spec is not None else ():
            for found in sorted(Path(folder).rglob("libtaskd.so")):
                return str(found)
    return ""


def render(prepared: Prepared, command: list[str]) -> str:
    """Format the output of `--dry-run`: the variables with their reasons, and the commands."""
    lines = [f"export {s.name}={_quoted(s.value)}  # {s.why}" for s in prepared.settings]
    lines += [f"# note: {note}" for note in prepared.notes]
    if prepared.manager:
        lines.append("lastgasp manager &  # TaskD's manager, on the first pod")
    if prepared.proxy:
        lines.append("python -m lastgasp.backends.ascend.proxy &  # TaskD's proxy of this pod")
    if prepared.taskd_agent:
        lines.append("# TaskD's own agent runs the workers, since its manager restarts them")
    return "\n".join([*lines, " ".join(_quoted(word) for word in command)])


def _quoted(text: str) -> str:
    return text if re.fullmatch(r"[\w@%+=:,./-]+", text) else "'" + text.replace("'", "'\\''") + "'"


def must_start_anew(prepared: Prepared, env: Mapping[str, str]) -> bool:
    """Re-execute: TaskD's library reads the environment of exec time, so new variables must be set before."""
    return bool(prepared.settings) and env.get(PREPARED) != str(os.getpid())
