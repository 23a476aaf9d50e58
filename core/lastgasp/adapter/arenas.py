"""State that only one rank holds: a source says what it is, and an arena keeps it when the rank is killed.

A state source with such state is a `ShardSource` too. Its `arena` is filled by a `Filling` at the end of each step, on
the training thread, by all ranks at the same steps; docs/sharded.md says what that costs and saves. A restarted job
asks by `taken_over` for what its ranks have left in their arenas, before it chooses a checkpoint; or by `left_by_all`,
and writes a checkpoint of it.
"""

from __future__ import annotations

from lastgasp.arena import Arena, DamagedArena, verified
from lastgasp.arena_filling import ArenaMode, Filling, lost_with_a_host
from lastgasp.arena_taking import Taken, left_by_all, taken_over
from lastgasp.config import arena_of, buddy_of
from lastgasp.ports import ShardSource, Wanted

__all__ = [
    "Arena",
    "ArenaMode",
    "DamagedArena",
    "Filling",
    "ShardSource",
    "Taken",
    "Wanted",
    "arena_of",
    "buddy_of",
    "left_by_all",
    "lost_with_a_host",
    "taken_over",
    "verified",
]
