"""The sum of the losses since the last log. Trainer leaves it on the device, and so it is not waited for here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from lastgasp.adapter import torch as shared

CAUSE = " (as where evaluate() logs on one rank only: let it call log() on all, as Trainer's own does)"


class OfSeat(msgspec.Struct):
    """What a rank has of another rank of the complete job, which is missing: its random state, and where it stands."""

    random: bytes
    data: shared.PrefetchedPosition | None


class Own(msgspec.Struct):
    """What differs between ranks, besides random state and buffers.

    Attributes:
        loss: the sum.
        seat: of which of its seats the random state and `data` are, where ranks are missing (`Seats`).
        others: what it has of its other seats.
        rows: how many `log_history` had; -1 where that was not recorded.
    """

    loss: float
    flos: float
    data: shared.PrefetchedPosition | None = None
    seat: int = -1
    others: dict[int, OfSeat] = {}
    rows: int = -1


class Found(Own):
    """The same, as it is read.

    Attributes:
        lacking: the device had not told the sum: this is the one at the end of the step before.
    """

    lacking: bool = False


class LossSum:
    """Of one rank. On an accelerator it comes to the host when the device has come to it, and nobody waits.

    Args:
        device: where it is.
        module: torch's module of that kind of device; looked up where left out.
    """

    def __init__(self, device: torch.device, module: Any = None) -> None:
        self._module = module if module is not None or device.type == "cpu" else _module_of(device)
        self._device = device
        self._event = self._module.Event() if self._module is not None else None
        self._host: Tensor | None = None
        self._asked: tuple[Tensor, int] | None = None
        self._now: float | None = None

    def ahead(self, total: Tensor, own: Tensor, finite: bool, steps: int) -> None:
        """Ask for what it will be with a step's loss; `finite`: others count as the mean of the `steps`, as there."""
        own = own.detach()
        if self._event is not None:
            known = torch.where(own.isfinite(), total + own, total + total / steps) if finite else total + own
            self.ask(known)
            self._asked = None  # what comes to the update may be another one
        else:
            self.ask(total + (own if not finite or math.isfinite(own.item()) else total / steps))

    def ask(self, total: Tensor) -> None:
        """Have it as it stands; on the training thread."""
        self._now, self._asked = None, (total, total._version)
        if self._event is None:
            self._now = total.item()
            return
        if self._host is None or self._host.dtype != total.dtype:
            self._host = _page_locked(total.dtype)
        self._host.copy_(total.detach().reshape(()), non_blocking=True)
        self._event.record(self._module.current_stream(self._device))

    def told(self) -> float | None:
        """What was last asked for; None where the device has not come to it. Waits for nothing."""
        if self._now is None and self._host is not None and self._event is not None and self._event.query():
            self._now = self._host.item()
        return self._now

    def of(self, total: Tensor) -> float:
        """As it stands. Waits where it was changed since it was asked for."""
        asked = self._asked
        if asked is None or asked[0] is not total or asked[1] != total._version or (now := self.told()) is None:
            now = self._now = total.item()
            self._asked = total, total._version
        return now


def lost(aux: Mapping[int, bytes]) -> str:
    """What to note on a checkpoint with these ranks' states; empty if all sums are known."""
    ranks = [rank for rank, data in aux.items() if data and found_in(shared.extra_of(data)).lacking]
    return (f"the loss of the last step of ranks {ranks} was lost with their processes: the next loss that is logged "
            "is without it") if ranks else ""  # fmt: skip


def unlogged(aux: Mapping[int, bytes], rank: int) -> str:
    """What to note where that rank saves a step, and rank 0, which writes Trainer's logs, has rows that it lacks."""
    rows = {one: found_in(shared.extra_of(aux[one])).rows for one in (0, rank) if aux.get(one)}
    more = rows.get(0, -1) - rows.get(rank, -1)
    if -1 in rows.values() or rank not in rows or more <= 0:
        return ""
    return (f"rank 0 alone has logged {more} of its rows, and rank {rank} saves the step: log_history and "
            "trainer_state.json go on without them") + CAUSE  # fmt: skip


def found_in(extra: bytes) -> Found:
    """What a rank has recorded."""
    return msgspec.msgpack.decode(extra, type=Found)


def _page_locked(dtype: torch.dtype) -> Tensor:
    """Memory that a device writes to while the host goes on."""
    return torch.zeros((), dtype=dtype, pin_memory=True)


def _module_of(device: torch.device) -> Any:
    """None where it has no streams that one could ask: then the host waits, as for any other number there."""
    try:
        _page_locked(torch.float32)
    except RuntimeError:
        return None
    return shared.QueuedWork.module_of(device)
