"""The handlers that a job has registered, and how they are called (docs/facts/mindio_tft.md §6)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lastgasp.adapter import NotSaveable
from lastgasp_mindio.elastic import DOWN, UP

log = logging.getLogger("lastgasp")


@dataclass
class Handlers:
    """One slot for each; the last one registered counts.

    Attributes:
        args: what handlers are given: the arguments of the decorated function, or of `tft_set_step_args`.
        inside: whether this thread runs one of them.
    """

    args: Any = None
    _slots: dict[str, tuple[Callable[..., Any], Any]] = field(default_factory=dict)
    _thread: threading.local = field(default_factory=threading.local)

    def register(self, name: str, func: Callable[..., Any], ctx: Any) -> None:
        """Take a handler."""
        self._slots[name] = (func, ctx)

    def __contains__(self, name: object) -> bool:
        return name in self._slots

    @property
    def inside(self) -> str:
        """The handler that runs on this thread; empty for none."""
        found: str = getattr(self._thread, "name", "")
        return found

    def refuse(self, what: str) -> None:
        """A call that would wait for the end of the recovery, which waits for the handler.

        Raises:
            RuntimeError: this thread runs a handler.
        """
        if self.inside:
            raise RuntimeError(f"{what} inside the {self.inside} handler: return from the handler first")

    def save(self, step: int, info: list[dict[str, Any]]) -> None:
        """Have this rank's part of the dump written. Raises what the handler raises, NotSaveable without one."""
        self._call("save_ckpt", step, info, self.args, ctx=True)

    def rename(self, step: int) -> None:
        """All have saved. Without a handler there is nothing to do, as with MindIO; it gets no ctx there, either."""
        if "rename" in self:
            self._call("rename", step, self.args, ctx=False)

    def stop(self) -> None:
        """Have the device's work aborted. As `save`."""
        self._call("stop", self.args, ctx=True)

    def clean(self, memory_error: bool) -> int:
        """Have the device's state cleared. Returns 0, or 2: its memory is good although it reported an error.

        Raises:
            NotSaveable: there is no handler, or the device is not good after it.
        """
        result = self._call("clean", memory_error, self.args, ctx=True)
        if result not in (0, 2):
            raise NotSaveable(f"the clean handler has returned {result!r}")
        return int(result)

    def rebuild_group(self, ranks: list[int], grown: bool = False) -> None:
        """Have the process groups made anew with the new processes of `ranks`. As `save`.

        Args:
            grown: these ranks were missing before; here and below MindIO's upgrade handlers are called then.
        """
        self._in_place("rebuild_group", "rebuild", grown, ranks)

    def repair(self, step: int, need_rebuild: bool, info: dict[str, Any], grown: bool = False) -> None:
        """Have this rank's shard of `step` sent or received. As `save`."""
        self._in_place("repair", "repair", grown, step, need_rebuild, sorted(set(info["dst"])), info)

    def rollback(self, step: int, grown: bool = False) -> None:
        """Have loop, data and scheduler put to `step`. As `save`."""
        self._in_place("rollback", "rollback", grown, step)

    def zit_downgrade_rebuild(self, dp_ranks: list[int], world_ranks: list[int]) -> None:
        """Have the process groups and the shares of the batch made anew for the ranks that are left. As `save`."""
        self._call("zit_downgrade_rebuild", dp_ranks, world_ranks, self.args, DOWN, ctx=False)

    def _in_place(self, name: str, grows: str, grown: bool, *given: Any) -> None:
        if grown:
            self._call(f"zit_upgrade_{grows}", *given, self.args, UP, ctx=False)
        else:
            self._call(name, *given, self.args, ctx=True)

    def _call(self, name: str, *given: Any, ctx: bool) -> Any:
        if name not in self._slots:
            raise NotSaveable(f"no {name} handler is registered")
        func, own = self._slots[name]
        with self._marked(name):
            return func(*given, own) if ctx else func(*given)

    @contextmanager
    def _marked(self, name: str) -> Iterator[None]:
        self._thread.name = name
        try:
            yield
        finally:
            self._thread.name = ""
