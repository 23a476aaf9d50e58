"""Workers at TaskD: the registry port on `taskd.api` (docs/facts/taskd.md §1).

Its functions do not raise: they log and return False, and True means little. So everything is checked before, and
whether a worker is registered is inferred from its effects (`evidence`).
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from lastgasp import _clock
from lastgasp.errors import ConfigError, ControlError
from lastgasp.gasp.cards import WorkerCard
from lastgasp.jobs.registry import WorkerRegistry

from .evidence import Evidence, evidence
from .goenv import environment_at_exec, set_too_late
from .logdir import prepare_log_directory

log = logging.getLogger("lastgasp")

Framework = Literal["pt", "ms"]
DEFAULT_LIMIT_MB = 5000
LEAST_LIMIT_MB = 10
"""Below it TaskD's count cap is 0, and only the first batch is ever written (docs/facts/taskd.md §6)."""
REGISTERED_WITHIN = 200.0
"""Seconds until a warning about an unregistered worker: TaskD itself waits up to 180 s for the profiler."""
LOOK = 1.0
"""Seconds between two looks."""
_NEEDED: Mapping[Framework, tuple[str, ...]] = {"pt": ("RANK", "LOCAL_WORLD_SIZE"), "ms": ("MS_NODE_RANK",)}
_STARTED: list[TaskdApi] = []
"""The worker of this process: a second init would run a second set of goroutines (docs/facts/taskd.md §1)."""


class TaskdApi(Protocol):
    """The part of `taskd.api` that is used.

    `destroy_taskd_worker` is not: it closes the network under TaskD's own receive loop, which panics and ends a process
    that had trained well with -6. The exit hook that TaskD registers for itself is enough.
    """

    def init_taskd_worker(self, rank_id: int, upper_limit_of_disk_in_mb: int, framework: str) -> bool:
        """Once."""

    def start_taskd_worker(self) -> bool:
        """Afterwards."""


class TaskdRegistry:
    """Serves `WorkerRegistry` by TaskD; for one process, once.

    Args:
        api: `taskd.api`.
        framework: "pt" or "ms".
        limit_mb: MB that TaskD's profiling files of all jobs may take.
        inner: the embedded engine's registry, called as well, so that `lastgasp ps` shows the worker.
        look: inspects the worker; tests pass another one.
    """

    def __init__(
        self,
        api: TaskdApi,
        framework: Framework,
        limit_mb: int = DEFAULT_LIMIT_MB,
        inner: WorkerRegistry | None = None,
        look: Callable[[], Evidence] = evidence,
    ) -> None:
        self._api, self._framework, self._limit, self._inner = api, framework, limit_mb, inner
        self._watch = _Watch(look)
        self._started = False

    @classmethod
    def open(
        cls, framework: Framework, limit_mb: int = DEFAULT_LIMIT_MB, inner: WorkerRegistry | None = None
    ) -> TaskdRegistry:
        """Check what TaskD would silently refuse, then import it.

        Raises:
            ConfigError: an environment, a limit or a log directory with which no worker can register.
            ControlError: TaskD is there and cannot be imported.
        """
        check_worker(framework, limit_mb, os.environ)
        prepare_log_directory(os.environ)
        _warn_of_late_variables()
        return cls(import_taskd(), framework, limit_mb, inner)

    def register(self, card: WorkerCard) -> None:
        """As in the port. TaskD's own call is not idempotent; this one is."""
        if self._inner is not None:
            self._inner.register(card)
        if self._started:
            return
        self._started = True
        try:
            done = self._begin(int(card.rank))
        except Exception as error:
            log.error("TaskD does not know rank %d: %s: %s", card.rank, type(error).__name__, error)
            return
        if not done:
            log.error("TaskD does not know rank %d: it refused the worker; its taskd.log says why", card.rank)
            return
        self._watch.begin(card.rank)

    def _begin(self, rank: int) -> bool:
        """Whether the process now has a worker; that of an earlier training in it continues."""
        if any(one is self._api for one in _STARTED):
            return True
        if self._api.init_taskd_worker(rank, self._limit, self._framework) is not True:
            return False
        _STARTED.append(self._api)
        return self._api.start_taskd_worker() is True

    def deregister(self) -> None:
        """As in the port. TaskD's worker lives as long as the process, which may train again."""
        self._watch.close()
        if self._inner is not None:
            self._inner.deregister()


class _Watch:
    """Checks whether the worker is registered, and logs the result once."""

    def __init__(self, look: Callable[[], Evidence]) -> None:
        self._look, self._ended = look, threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, rank: int) -> None:
        self._thread = threading.Thread(target=self._run, args=(rank,), name="lastgasp-taskd-watch", daemon=True)
        self._thread.start()

    def _run(self, rank: int) -> None:
        deadline = _clock.monotonic() + REGISTERED_WITHIN
        found = self._look()
        while not found.registered and _clock.monotonic() < deadline:
            if self._ended.wait(LOOK):
                return
            found = self._look()
        if found.registered:
            log.info("rank %d is registered with TaskD: connected to its proxy, and that to the manager", rank)
        else:
            log.error("rank %d is not registered with TaskD: %s", rank, found.missing)

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * LOOK)


def check_worker(framework: str, limit_mb: object, env: Mapping[str, str]) -> None:
    """Refuse what TaskD's `init_taskd_worker` answers with a bare False.

    Raises:
        ConfigError: the framework, the limit, or a rank variable.
    """
    if framework not in _NEEDED:
        raise ConfigError("framework", framework, "'pt' or 'ms'", "Give the one that the job runs.")
    if isinstance(limit_mb, bool) or not isinstance(limit_mb, int) or limit_mb < LEAST_LIMIT_MB:
        allowed = f"an integer of at least {LEAST_LIMIT_MB} (MB)"
        raise ConfigError("profiling_limit_mb", limit_mb, allowed, "With less TaskD writes its first batch only.")
    for name in _NEEDED[framework]:  # type: ignore[index]
        value = env.get(name) or ""
        if not (value.isascii() and value.isdigit()):
            raise ConfigError(
                name, env.get(name), "a number in the environment", "torchrun, msrun or the job's operator sets it."
            )


def import_taskd() -> Any:
    """`taskd.api`, the log directory being prepared.

    Raises:
        ControlError: it cannot be imported; carries why.
    """
    try:
        api = importlib.import_module("taskd.api")
    except Exception as error:
        raise ControlError(f"TaskD is installed and cannot be imported: {type(error).__name__}: {error}") from error
    missing = [name for name in ("init_taskd_worker", "start_taskd_worker") if not hasattr(api, name)]
    if missing:
        raise ControlError(f"taskd.api has no {', '.join(missing)}: this is not MindCluster's TaskD")
    return api


def _warn_of_late_variables() -> None:
    try:
        late = set_too_late(environment_at_exec(), os.environ)
    except OSError:
        return
    for name, (go, python) in late.items():
        log.warning(
            "%s=%r was set after this process started: TaskD's library sees %r. Set it before, as `lastgasp run` does",
            name,
            python,
            go,
        )
