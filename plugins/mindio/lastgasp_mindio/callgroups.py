"""Process groups that a save handler makes, where it is called more than once.

torch names a group that only its members make (`new_group(..., use_local_synchronization=True)`) by its ranks and by
the number of groups that the process has. Ranks that were called differently often would wait for one another under
different names until the store's timeout; and a name that was used before finds old addresses in the store. MindIO
itself names them by their ranks and by the number of its repair.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
import xxhash
from torch.distributed import distributed_c10d

log = logging.getLogger("lastgasp")

Savers = tuple[tuple[int, ...], ...]


@contextmanager
def naming(suffix: str) -> Iterator[None]:
    """Have groups that are made meanwhile be named by their ranks and this suffix; without one torch names them."""
    module: Any = distributed_c10d
    names = getattr(module, "_process_group_name", None)
    if not suffix or names is None:
        yield
        return

    def named(ranks: list[int], use_hashed_name: bool) -> str:
        if not use_hashed_name:  # of all ranks, which count alike
            return f"{names(ranks, use_hashed_name)}-{suffix}"
        name = f"{xxhash.xxh3_128_hexdigest('_'.join(map(str, ranks)).encode())}-{suffix}"
        while name in module._world.pg_names.values():
            name += "-again"
        return name

    module._process_group_name = named
    try:
        yield
    finally:
        module._process_group_name = names


class CallGroups:
    """Those of one rank; used by one thread at a time.

    Args:
        incarnation: in which its save handler is called. Groups may be made in the store of an earlier one.
    """

    def __init__(self, incarnation: int = 0) -> None:
        self._incarnation = incarnation
        self._before: set[Any] | None = None
        self._kept: list[Any] = []
        self._orders: Counter[Savers] = Counter()

    def ordered(self, savers: Savers) -> int:
        """How often these ranks were ordered to save before: the same on all of them."""
        self._orders[savers] += 1
        return self._orders[savers] - 1

    @contextmanager
    def calling(self, number: int) -> Iterator[None]:
        """Around a call of the handler; `number` is that of `ordered`."""
        self.drop()
        if self._before is None:
            self._before = set(_listed())
        with naming(f"call{self._incarnation}-{number}" if number or self._incarnation else ""):
            yield

    def drop(self) -> None:
        """Have groups of earlier calls no longer counted; the objects stay, as a thread of theirs may be stuck."""
        for group in [one for one in _listed() if self._before is not None and one not in self._before]:
            self._kept.append(group)
            try:
                dist.destroy_process_group(group)
            except Exception:
                log.debug("a process group of an earlier save could not be destroyed", exc_info=True)


def _listed() -> list[Any]:
    return list(getattr(getattr(distributed_c10d, "_world", None), "pg_map", None) or ())


def waits_for_others(thread: int) -> bool:
    """Whether a thread is inside of torch's process groups, such as in a rendezvous with a rank that is gone."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_filename == distributed_c10d.__file__:
            return True
        frame = frame.f_back
    return False


def this_thread() -> int:
    """The number by which `waits_for_others` knows it."""
    return threading.get_ident()
