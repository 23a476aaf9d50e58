"""Parameters that a training changes before its update: momentum encoders (MoCo), prototypes that are normalized first.

All other parameters are read live after a fault, since nothing but an update changes them. These are ahead of the last
step by then, so they are copied at the end of each step, from the first time that one of them was seen to move.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lastgasp.pytorch.buffers import Seen

log = logging.getLogger("lastgasp")

_FIRST = 3
"""Steps in which all parameters are looked at; later one in each step, in turn."""
_PATIENCE = 100
"""Steps without a move after which no copies are made any more: weights that were loaded once, for example."""

_Where = tuple[str, dict[str, Any], str]


class MovingParameters:
    """Those of one module. The training thread calls all but `held`.

    A change is seen by torch's counter of changes and by the place in memory; in host memory bytes out of all of the
    tensor are compared, too.

    Args:
        module: whose parameters; what is added to it later does not count.
        note: reports what people must know (`Session.note`).
        copied: called when copies have been queued that a gasp may read, and no end of a step follows.
    """

    def __init__(
        self, module: nn.Module, note: Callable[[str], object], copied: Callable[[], object] = lambda: None
    ) -> None:
        self._note, self._copied = note, copied
        self._all: list[_Where] = [
            (f"{prefix}.{name}" if prefix else name, child._parameters, name)
            for prefix, child in module.named_modules()
            for name in child._parameters
        ]
        self._rows = [[(where, Seen())] for where in self._all]
        self._looked_at: list[tuple[_Where, Seen]] = []
        self._steps = self._turn = self._quiet = 0
        self._moving: dict[str, int] = {}
        self._kept: dict[str, Tensor] = {}
        self._step, self._opened = -1, list[str]()
        self._open = self._changes = False
        self._aside: list[tuple[_Where, Seen]] | None = []
        self._aside_kept: dict[str, Tensor] = {}
        self._last = -1

    @classmethod
    def of(cls, state: Any, note: Callable[[str], object], copied: Callable[[], object]) -> MovingParameters:
        """Those of a loop's `TorchState`; none where its models are sharded."""
        return cls(nn.Module() if state.sharded else state.container, note, copied)

    def closes(self, step: int) -> None:
        """A step has ended: copy what moves, and look at some of the rest."""
        self._step, self._open, self._aside, self._last = -1, False, None, step
        if self._aside_kept:
            self._aside_kept = {}
        if self._moving:
            self._copy(step)
        turn, count = self._turn, len(self._rows)
        if not count:
            return
        self._turn = turn + 1 if turn + 1 < count else 0
        if self._steps < _FIRST:
            self._looked_at = list(chain(*self._rows))
        elif self._moving:
            self._looked_at = list(chain(*(self._rows[i] for i in {turn, *islice(self._moving.values(), 1)})))
        else:
            self._looked_at = self._rows[turn]
        self._steps += 1
        _look(self._looked_at)

    def aside(self) -> None:
        """What is due after a step may change parameters (a validation with averaged weights): look at all of them.

        From the second time on that they change, or if one has, all are copied before.
        """
        if self._aside is not None:
            return
        looked_at = [(where, Seen()) for where in self._all]
        _look(looked_at)
        self._aside = looked_at  # once all were: a gasp may ask at any moment, and what was not differs
        if self._changes:
            try:
                found = ((where[0], _live(where)) for where in self._all)
                self._aside_kept = {name: p.detach().clone() for name, p in found if p is not None}
                self._copied()
            except RuntimeError as error:  # no memory for it; `missing` says what that costs
                log.info("parameters cannot be copied before a validation: %s", str(error).splitlines()[0])

    def in_aside(self) -> None:
        """A validation is under way: know whether it changes parameters. Call it once others have begun."""
        if self._aside and not self._changes:
            self._changes = bool(_moved(self._aside))

    def opens(self) -> None:
        """An update is about to begin: compare what was looked at with how it was at the end of the last step."""
        if self._aside:
            self.in_aside()
        self._opened, self._open = opened, _ = _moved(self._looked_at) if self._looked_at else [], True
        new = [name for name in opened if name not in self._moving] if opened else opened
        self._quiet = 0 if opened else self._quiet + 1
        if new:
            self._steps = 0  # look at all of them
            numbers = {name: number for number, (name, _, _) in enumerate(self._all)}
            self._moving = self._moving | {name: numbers[name] for name in new}
            log.info("%d parameters change before the update (%s): they are copied at the end of each step",
                     len(self._moving), _some(self._moving))  # fmt: skip
        elif self._moving and self._quiet >= _PATIENCE:
            self._moving, self._kept = {}, {}

    def _copy(self, step: int) -> None:
        found = ((name, _live(self._all[number])) for name, number in self._moving.items())
        live = {name: p.detach() for name, p in found if p is not None}
        kept = self._kept
        try:
            if {n: (t.shape, t.dtype) for n, t in live.items()} == {n: (t.shape, t.dtype) for n, t in kept.items()}:
                torch._foreach_copy_(list(kept.values()), list(live.values()))
            else:
                self._kept = {name: t.clone() for name, t in live.items()}
        except RuntimeError as error:  # no memory for it
            self._note(f"parameters that change before the update cannot be copied ({str(error).splitlines()[0]}): a "
                       "fault before the update saves them as they are then")  # fmt: skip
            self._moving, self._kept, self._all, self._rows = {}, {}, [], []
            return
        self._step = step

    def held(self, step: int) -> dict[str, Tensor]:
        """Name in the module's `state_dict` -> value at the end of `step`, of those that move. Any thread may ask."""
        if self._aside_kept and self._last == step:
            return self._aside_kept
        return self._kept if self._step == step else {}

    def missing(self, step: int) -> str:
        """What to note on a checkpoint of `step` that is made now; empty where all is as it was."""
        held, moved = self.held(step), self._opened if self._open else _moved(self._aside or self._looked_at)
        lost = [name for name in moved if name not in held]
        return (
            f"{len(lost)} parameters were changed since the end of step {step}, before an update ({_some(lost)}): they "
            "are saved as they were at the fault, and a resume will not be bit-equal"
        ) if lost else ""  # fmt: skip


def _look(at: list[tuple[_Where, Seen]]) -> None:
    for (_, holder, name), seen in at:
        if (live := holder.get(name)) is not None:
            seen.remember(live)


def _moved(looked_at: list[tuple[_Where, Seen]]) -> list[str]:
    found = []
    for (full, holder, name), seen in looked_at:
        if (live := holder.get(name)) is not None and seen.differs_from(live) and not is_lazy(live):
            found.append(full)
    return found


def _live(where: _Where) -> Tensor | None:
    found: Tensor | None = where[1].get(where[2])
    return None if found is None or is_lazy(found) else found


def _some(names: Iterable[str]) -> str:
    named = list(names)
    return ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")
