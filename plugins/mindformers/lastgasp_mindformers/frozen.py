"""Large parameters that the optimizer does not train: read live at a gasp, which is right only while the graph does
not change them.

A frozen weight stays as it is. A target network that the forward pass moves (BYOL, mean teacher) is one step ahead as
soon as the graph of the next step has begun, and nothing in the graph says so. So digests tell: around the second step,
for a note, and at each gasp out of a graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import xxhash

from lastgasp_mindformers.digests import bytes_of


class Frozen:
    """Knows which of the large parameters the forward pass changes.

    Args:
        params: by name; empty where no gasp comes out of a graph (on a device).
        accumulated: those that should be zero at the end of each step.
        still: smaller ones that have not changed so far, with digests of them; it may become more while training runs.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        accumulated: Mapping[str, Any],
        still: Mapping[str, tuple[Any, bytes]] = MappingProxyType({}),
    ) -> None:
        self._params, self._accumulated, self._still = params, accumulated, still
        self._known = self._before = self._digests()
        self._ended = 0

    def step_begin(self) -> None:
        """Callbacks have run, and the graph is next."""
        if self._ended == 1:
            self._before = self._digests()

    def step_end(self) -> list[str]:
        """The graph has returned, and no callback has run since. Returns what people must know."""
        self._ended += 1
        if self._ended > 2:  # of two steps in a row at most one is the last of those that are accumulated
            return []
        return [*filter(None, (kept_sums(self._accumulated), self._moved()))]

    def _moved(self) -> str:
        if self._ended == 1:
            self._known = self._digests()  # MindSpore may have broadcast them in this step
        if self._ended != 2:
            return ""
        after, before = self._digests(), self._before
        moved = {name for name in after if after[name] != before[name]}
        # What only callbacks change is as they left it, whenever it is read.
        self._known = {name: known for name, known in self._known.items() if name in moved or known == before[name]}
        return f"the forward pass changes {_few(moved)}, too large to capture in each step: {_COSTS}" if moved else ""

    def changed(self) -> str:
        """Those that are not what they were, for people; empty where all are."""
        now = self._digests()
        changed = {name for name, known in self._known.items() if now[name] != known}
        return _few(changed | self._moved_late())

    def not_still(self) -> str:
        """Of the smaller ones, those that have changed after all, for people; empty where none has."""
        return _few(self._moved_late())

    def _moved_late(self) -> set[str]:
        return {name for name, (param, known) in self._still.items() if _digest(param) != known}

    def _digests(self) -> dict[str, bytes]:
        return {name: _digest(param) for name, param in self._params.items()}


def _digest(param: Any) -> bytes:
    return xxhash.xxh3_128_digest(bytes_of(param))


def kept_sums(params: Mapping[str, Any]) -> str:
    """What people must know of accumulated gradients when a step has ended; empty where all of them are zero again."""
    kept = {name for name, param in params.items() if "BFloat16" not in str(param.dtype) and param.asnumpy().any()}
    if not kept:
        return ""
    return (
        f"{_few(kept)}: gradients are accumulated over several steps under the name of MindSpore's own, which are zero "
        "when a step ends and in no checkpoint: behind a resume they begin at zero. Give them another prefix, and they "
        "are saved"
    )


_COSTS = (
    "where a rank is killed while the others are in a step, none of them can save, and the job goes back to its newest "
    "checkpoint"
)


def _few(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3]) + f" and {len(names) - 3} others" * (len(names) > 3)
