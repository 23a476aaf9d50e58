"""Recovery in place: MindIO's retry, recover (ARF) and elastic training (zit), by its handlers, in its order
(docs/facts/mindio_tft.md §7.1, §7.4).

The engine has agreed on the step (`gasp.ladder`), and this rank's training thread has left its training function. All
ranks, new processes among them, join the next incarnation, and call together: stop and clean, rebuild_group where a
rank was replaced, repair on those that hold a shard and those that lack it, rollback on all. Then the function is
entered again. Where ranks are missing from then on it is zit_downgrade_rebuild alone that follows stop and clean; where
they are there again, zit_upgrade_rebuild, _repair and _rollback.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

from lastgasp.adapter import DeadlineExceeded, Release, cause_of
from lastgasp.adapter.again import Again
from lastgasp_mindio import device, elastic
from lastgasp_mindio.callgroups import naming
from lastgasp_mindio.enums import RepairType
from lastgasp_mindio.handlers import Handlers
from lastgasp_mindio.shards import Group, Info
from lastgasp_mindio.source import Saver

WAIT = 300.0
"""Seconds that a new process waits for what the others know of the shards; as a gather of the engine's."""
_KEY = "lastgasp/mindio/replicas"

Pair = tuple[int, int, int]
"""Optimizer type, the rank that sends its shard, the rank that takes it."""


def pairs_of(groups: Sequence[Group], takers: Sequence[int]) -> list[Pair]:
    """Who sends to whom: each taker's shard comes from the next holder behind it, as with MindIO. Pure.

    Raises:
        ValueError: nobody else holds a shard.
    """
    found = []
    for group in groups:
        for shard in group.shards:
            for taker in [rank for rank in shard if rank in takers]:
                at = shard.index(taker)
                holders = [rank for rank in (*shard[at:], *shard[:at]) if rank not in takers]
                if not holders:
                    raise ValueError(f"no rank holds the shard of rank {taker}")
                found.append((group.kind, holders[0], taker))
    return found


def info_of(rank: int, pairs: Sequence[Pair], kind: RepairType) -> dict[str, Any]:
    """MindIO's `repair_info` for one rank: the pairs that it is in, and everybody who takes part."""
    own = [pair for pair in pairs if rank in pair[1:]]
    return {
        "type": [pair[0] for pair in own],
        "repair_type": kind.value,
        "src": [pair[1] for pair in own],
        "dst": [pair[2] for pair in own],
        "rank_list": sorted({rank for pair in pairs for rank in pair[1:]}),
    }


# -- what a new process has to know ------------------------------------------------------------------


def tell_replacements(infos: Sequence[Info | None]) -> None:
    """Leave what all ranks have reported about their shards in the store where they meet."""
    _store().set(_KEY, json.dumps(infos))


def told() -> list[Info | None]:
    """The same, in a new process. Raises what torch raises where nobody has told it."""
    found: list[Info | None] = json.loads(_store().get(_KEY))
    return found


def _store() -> TCPStore:
    host, port = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=WAIT))


# -- the handlers ------------------------------------------------------------------------------------


class Repair:
    """One recovery on this rank; called on the training thread, the handlers run on one of their own.

    Args:
        again: what was agreed, by the numbers of this incarnation; saver: of the incarnation that this rank has joined.
        together: returns when all ranks have called it with the same words (`Session.gather`).
        kind: what this rank takes part as, where it takes a shard.
    """

    def __init__(
        self, again: Again, saver: Saver, handlers: Handlers, together: Callable[[str, bytes], object], kind: RepairType
    ) -> None:
        self._again, self._saver, self._handlers = again, saver, handlers
        self._together, self._kind = together, kind

    def run(self) -> None:
        """All of it; see the module.

        Raises:
            ControlError, DeadlineExceeded: another rank is lost, or does not come.
            Exception: what a handler raises.
        """
        again, rank, handlers = self._again, self._saver.rank, self._handlers
        self._together("mindio: stopped", b"")
        if again.rung == "shrink":
            left = list(self._saver.seats)
            self._call(lambda: handlers.zit_downgrade_rebuild(left, left))
            self._together("mindio: rebuilt", b"")
            return
        grown = again.rung == "grow"
        if new := elastic.returning(again) if grown else list(again.lost):
            self._call(lambda: handlers.rebuild_group(new, grown))
            self._together("mindio: rebuilt", b"")
        pairs = pairs_of(self._saver.groups, again.takers)
        if any(rank in pair[1:] for pair in pairs):
            kind = self._kind if rank in again.takers else RepairType.RT_SEND
            info = info_of(rank, pairs, kind)
            anew = kind is RepairType.RT_UCE_HIGHLEVEL
            self._call(lambda: handlers.repair(again.step, anew, info, grown))
        if pairs:
            self._together("mindio: repaired", b"")
        self._call(lambda: handlers.rollback(again.step, grown))
        self._together("mindio: rolled back", b"")

    def _call(self, handler: Callable[[], object]) -> None:
        """On a thread, since one that hangs must not keep this rank; meanwhile nothing may be saved here."""
        raised: list[BaseException] = []

        def call() -> None:
            try:
                with device.current(), naming(f"again{self._again.incarnation}" if self._again.members else ""):
                    handler()
            except BaseException as error:  # of any kind: it is raised on the training thread
                raised.append(error)

        thread = threading.Thread(target=call, name="lastgasp-mindio", daemon=True)
        limit = self._saver.config.save_timeout
        self._saver.parked.clear()
        thread.start()
        thread.join(limit)
        self._saver.parked.set()
        if raised:
            raise raised[0]
        if thread.is_alive():
            raise DeadlineExceeded("a handler of the recovery in place", limit, "Raise LASTGASP_SAVE_TIMEOUT.")


class Stopper:
    """Calls the stop and the clean handler once a recovery in place was agreed on: the training thread may be stuck.

    Args:
        wait: waits so many seconds for the end of the recovery, and returns it.
        memory_failed: whether this rank reported an error of its memory.
    """

    LOOK = 1.0
    """Seconds between two looks whether the training has ended."""

    def __init__(
        self, saver: Saver, wait: Callable[[float], Release | None], memory_failed: Callable[[], bool]
    ) -> None:
        self._saver, self._wait, self._memory_failed = saver, wait, memory_failed
        self._closed, self._over = threading.Event(), threading.Event()
        self.problem = ""
        self._thread = threading.Thread(target=self._run, name="lastgasp-mindio-stop", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The training has ended."""
        self._closed.set()

    def wait_stopped(self, seconds: float) -> str:
        """Wait until both have returned. Returns why this rank cannot go on, or an empty string."""
        return self.problem if self._over.wait(seconds) else "the stop and clean handlers have not returned"

    def _run(self) -> None:
        outcome = None
        while outcome is None and not self._closed.is_set():
            outcome = self._wait(self.LOOK)
        if outcome is None or outcome.again is None:
            return
        os.environ.update(elastic.environment(outcome.again))  # handlers that make process groups meet at another store
        try:
            with device.current():
                self._saver.stop_and_clean(self._memory_failed())
        except BaseException as error:  # the training thread waits for it
            self.problem = cause_of(error)
        self._over.set()
