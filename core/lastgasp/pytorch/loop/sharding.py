"""Whether a loop's model is sharded; what that takes is imported only then."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lastgasp.pytorch.loop.again_here import LoopAgain

if TYPE_CHECKING:
    from lastgasp.arena_filling import ArenaMode
    from lastgasp.checkpoint.writer import ManifestWriter
    from lastgasp.pytorch.loop.sharded_loop import ShardedLoop

log = logging.getLogger("lastgasp")
IN_PLACE = ("auto", "retry", "replace")
"""Values of `recovery` with which a training may be entered again."""


def sharded_loop(run: Any, writer: ManifestWriter, mode: ArenaMode) -> tuple[ShardedLoop | None, type[LoopAgain]]:
    """What a run has to do about shards; None if its ranks hold all of the model. And how it is entered again.

    Where that can never be, `run.recovery` says so afterwards.

    Raises:
        ConfigError: it cannot be protected here.
    """
    if not run.state.sharded:
        return None, LoopAgain
    from lastgasp.pytorch.loop.sharded_loop import ShardedLoop
    from lastgasp.pytorch.loop.shards_again import ShardsAgain

    kind = ShardedLoop
    if run.state.engine is not None:
        from lastgasp.pytorch.loop.engine_loop import EngineLoop

        kind = EngineLoop
    found = kind(run, writer, mode)
    if found.never_again and run.recovery in IN_PLACE:
        if run.entry is not None and run.rank == 0:
            log.warning("a fault restarts this job: there is no recovery in place %s (docs/sharded.md)",
                        found.never_again)  # fmt: skip
        run.recovery = "restart"
    return found, ShardsAgain
