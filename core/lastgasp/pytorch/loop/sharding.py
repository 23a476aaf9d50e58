"""Whether a loop's model is sharded; what that takes is imported only then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lastgasp.arena_filling import ArenaMode
    from lastgasp.checkpoint.writer import ManifestWriter
    from lastgasp.pytorch.loop.sharded_loop import ShardedLoop


def sharded_loop(run: Any, writer: ManifestWriter, mode: ArenaMode) -> ShardedLoop | None:
    """What a run has to do about shards; None if its ranks hold all of the model.

    Raises:
        ConfigError: it cannot be protected here.
    """
    if not run.state.sharded:
        return None
    if run.state.engine is not None:
        from lastgasp.pytorch.loop.engine_loop import EngineLoop

        return EngineLoop(run, writer, mode)
    from lastgasp.pytorch.loop.sharded_loop import ShardedLoop

    return ShardedLoop(run, writer, mode)
