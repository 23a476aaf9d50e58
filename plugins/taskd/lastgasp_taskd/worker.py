"""The worker of this process: registered with lastgasp's controller, its ranges in lastgasp's marks."""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import wrapt

from lastgasp.adapter.worker import Marks, UnprotectedWorker, Worker, marks_here, session_here

from . import VERSION, log
from .said import once, refused, variables

NEEDED = {"pt": ("RANK", "LOCAL_WORLD_SIZE"), "ms": ("MS_NODE_RANK",)}
"""Without these variables the real one refuses the worker (docs/facts/taskd.md §1)."""
DIRECTORY = "TASKD_LOG_PATH"
DEFAULT_DIRECTORY = "taskd_log"
"""Where the real one puts what it writes; the marks, too, where neither MindCluster nor LASTGASP_PROFILING_DIR has
another place."""
MINDFORMERS = "lastgasp_mindformers"
"""Loaded, it will most likely protect this process."""


class TaskdWorker:
    """One worker; `taskd.api` keeps one per process.

    Where an adapter of lastgasp's protects the process, the rank is registered and marked by that already, and this
    does neither a second time. A rank registers once, and an adapter may come later than this, so it does so with its
    first step or range. Its children (a DataLoader's workers) do nothing: they have its rank and are none.

    Args:
        rank: the global rank; limit_mb: MB for the files of marks; framework: "pt" or "ms".

    Attributes:
        told: the script marks its steps; before, updates of the optimizer are counted.
    """

    def __init__(self, rank: int, limit_mb: int, framework: str) -> None:
        self.rank, self.framework = rank, framework
        # A child by "spawn" that runs the script's own calls, while it imports the script once more, is a copy too.
        self._pid = 0 if getattr(multiprocessing.current_process(), "_inheriting", False) else os.getpid()
        size = _number("WORLD_SIZE" if framework == "pt" else "MS_WORKER_NUM")
        local = _number("LOCAL_RANK", rank % max(_number("LOCAL_WORLD_SIZE", 1), 1))
        self.world_size = max(size, rank + 1)
        self._worker = UnprotectedWorker(
            Worker(
                rank=rank,
                world_size=self.world_size,
                directory=Path(os.environ.get(DIRECTORY) or DEFAULT_DIRECTORY).absolute(),
                limit_mb=limit_mb,
                framework=f"taskd {VERSION}",
                device=local,
                versions={"taskd": VERSION},
            )
        )
        self._lock = threading.Lock()
        self._started = self._begun = False
        self._once_marking: list[Callable[[], None]] = []
        self.destroyed = False
        self.told = False

    def start(self) -> None:
        """With MindSpore, where nobody counts steps, register now; else with the first step. Or an adapter does."""
        self._started = True
        if not self.serves:
            return
        if session_here():
            once("this rank is registered and marked by lastgasp's adapter; TaskD's names add nothing to that")
        elif self.framework == "ms" and MINDFORMERS not in sys.modules:
            self._begin()

    def waits(self, act: Callable[[], None]) -> bool:
        """Have `act` called once this rank marks; False where it does already, or was not started."""
        if self._begun or not self.serves or session_here():
            return False
        self._once_marking.append(act)
        return True

    @property
    def serves(self) -> bool:
        """It was started, by this process itself."""
        return self._started and self._pid == os.getpid()

    def marks(self) -> Marks | None:
        """Of this process; None where nothing is marked."""
        if not session_here():
            self._begin()
        return marks_here()

    def stepped(self, step: int) -> None:
        """A step is completed, the script's own range says."""
        self.told = True
        if not session_here():
            self._begin()
            self._worker.stepped(step)

    def updated(self, count: int) -> None:
        """An optimizer has made its update of this number since the start; the script has told no step yet."""
        if not self.told:
            self._begin()
            self._worker.stepped(count)

    def destroy(self) -> None:
        """The worker is no longer registered; its marks go on."""
        self.destroyed = True
        self._worker.leave()

    def _begin(self) -> None:
        with self._lock:
            if self._begun:
                return
            self._begun = True
            atexit.register(self._worker.close)
            self._worker.begin()
            if self.destroyed:
                self._worker.leave()
        if self._worker.joined:
            once(
                f"rank {self.rank} is registered (lastgasp ps) and marks its steps. Its state is unknown to lastgasp: "
                "after a fault the job starts again from the script's own checkpoints (docs/taskd-drop-in.md)"
            )
        else:
            once(
                f"rank {self.rank} marks its steps. It stands in no table: no launcher of lastgasp's has started it "
                "(lastgasp run, or torchrun where lastgasp is installed)"
            )
        if self.framework == "ms":
            self._worker.stepped(0)  # nothing counts its steps but its own ranges
        for act in self._once_marking:
            act()


current: TaskdWorker | None = None
"""Of this process."""


class Here:
    """Whoever is this process's worker when a range or an update ends; nobody where none was started, or in a child."""

    @property
    def told(self) -> bool:
        """Updates of optimizers need not be counted."""
        return current is None or not current.serves or current.told

    def marks(self) -> Marks | None:
        """Where ranges are recorded."""
        return current.marks() if current is not None and current.serves else None

    def stepped(self, step: int) -> None:
        """A range of a step has ended."""
        if current is not None and current.serves:
            current.stepped(step)

    def updated(self, count: int) -> None:
        """An optimizer has made its update."""
        if current is not None and current.serves:
            current.updated(count)


def init(rank_id: object, limit_mb: object, framework: object) -> bool:
    """`init_taskd_worker`, as the real one answers it; a second call changes nothing."""
    global current
    _serve_ranges("mindspore" if framework == "ms" else "torch")
    if not isinstance(rank_id, int) or not isinstance(limit_mb, int):
        return refused(f"init_taskd_worker: rank_id {rank_id!r} and the limit {limit_mb!r} must be whole numbers")
    if rank_id < 0 or limit_mb < 0:
        return refused(f"init_taskd_worker: rank_id {rank_id} and the limit {limit_mb} must not be negative")
    if framework not in NEEDED or not isinstance(framework, str):
        return refused(f"init_taskd_worker: framework {framework!r} is neither 'pt' nor 'ms'")
    if missing := [name for name in NEEDED[framework] if not os.environ.get(name, "").isdigit()]:
        return refused(f"init_taskd_worker: no number in {', '.join(missing)}; torchrun or msrun sets it")
    size = _number("WORLD_SIZE" if framework == "pt" else "MS_WORKER_NUM", rank_id + 1)
    if rank_id >= size:
        return refused(f"init_taskd_worker: there is no rank {rank_id} in a job of {size}")
    if current is not None:
        once("init_taskd_worker was called again: this process has its worker already")
        return True
    variables()
    current = TaskdWorker(int(rank_id), int(limit_mb), framework)
    return True


def start() -> bool:
    """`start_taskd_worker`."""
    if current is None:
        return refused("start_taskd_worker: init_taskd_worker has not been called, or was refused")
    try:
        current.start()
    except Exception as error:  # the real one raises nothing either, and training is worth more than its worker
        log.exception("rank %d is not registered", current.rank, exc_info=error)
        return False
    return True


def destroy() -> bool:
    """`destroy_taskd_worker`."""
    if current is None:
        return refused("destroy_taskd_worker: init_taskd_worker has not been called, or was refused")
    current.destroy()
    return True


_served: set[str] = set()


def _serve_ranges(name: str) -> None:
    """The script's ranges must do no harm whatever `init` answers, and whenever the framework is imported."""
    if name not in _served:
        _served.add(name)
        wrapt.register_post_import_hook(_imported, name)


def _imported(module: ModuleType) -> None:
    try:
        kind = "torch_ranges" if module.__name__ == "torch" else "mindspore_ranges"
        importlib.import_module(f".{kind}", __package__).serve(Here())
    except Exception as error:  # an import of the script's must not fail by this
        log.exception("the script's ranges are not served", exc_info=error)


def _number(name: str, default: int = 0) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else default
