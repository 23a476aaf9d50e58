"""Which controller of MindIO's the ranks of a job use: TaskD's, or one that rank 0 starts. All find it together."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import msgspec

from lastgasp.errors import ConfigError, DeadlineExceeded, LastgaspError
from lastgasp.gasp import messages as m

from . import api as package
from .controller import Endpoint, start_controller
from .early import early_of_this_process
from .limits import taskd_has_controller
from .processor_start import JOIN
from .strategies import Strategies
from .validation import address_of, checked_host, taskd_address, wait_for_listener

log = logging.getLogger("lastgasp")

Gather = Callable[[str, bytes], list[bytes]]


class Finder:
    """For one rank.

    Args:
        rank: this one; size: all. gather: an all-gather. host: where a controller of our own should listen.
    """

    def __init__(self, rank: int, size: int, gather: Gather, host: str) -> None:
        self._rank, self._size, self._gather, self._host = rank, size, gather, host

    def taskds(self) -> Endpoint | None:
        """TaskD's controller, if one listens: rank 0 checks, since it runs on its pod, and all ranks follow.

        Raises:
            ConfigError: an address for which MindIO would end the process.
        """
        if not taskd_has_controller(os.environ):
            return None
        early = early_of_this_process()
        if early is not None and early.anew:  # the others have agreed long ago
            return early.endpoint
        found: Endpoint | None = self._word_of_rank_0("mindio-taskd", self._look_for_taskds, Endpoint | None)
        if early is not None and found is None:
            raise ConfigError("MindIO", None, "one controller", "This rank has joined TaskD's, and rank 0 cannot.")
        return early.endpoint if early is not None else found

    def _look_for_taskds(self) -> Endpoint | None:
        if (early := early_of_this_process()) is not None:
            return early.endpoint
        address = address_of(*taskd_address(package.for_mindspore()))
        try:
            wait_for_listener(address, JOIN)
        except DeadlineExceeded as error:
            log.warning("%s The job continues with a controller of its own; TaskD repairs nothing in it", error)
            return None
        return Endpoint(address.host, address.port)

    def own(self, strategies: Strategies) -> Endpoint:
        """Have rank 0 start a controller; the same on all ranks.

        Raises:
            ConfigError: it could not be started, here or on rank 0.
        """

        def start() -> Endpoint:
            host = checked_host(self._host, "LASTGASP_BIND")
            return start_controller(host, self._size, strategies.recover, strategies.elastic)

        found: Endpoint = self._word_of_rank_0("mindio", start, Endpoint)
        return found

    def _word_of_rank_0(self, tag: str, find: Callable[[], Any], kind: Any) -> Any:
        """Return rank 0's result of `find` on all ranks; its errors there are raised on all."""
        said = b""
        if self._rank == 0:
            try:
                said = msgspec.json.encode(find())
            except (LastgaspError, OSError) as problem:
                said = msgspec.json.encode(m.one_line(problem))
        answer = msgspec.json.decode(self._gather(tag, said)[0], type=kind | str)
        if isinstance(answer, str):
            raise ConfigError("LASTGASP_BACKEND", "ascend", "'embedded' here", f"Rank 0 says: {answer}")
        return answer
