"""What a rank holds of a fit between two entries: the files that a checkpoint of it has besides tensors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lastgasp.adapter import GaspConfig, ManifestWriter, data_parallel, place_in_job
from lastgasp.adapter.arenas import Arena
from lastgasp_lightning.leaving import Leaving
from lastgasp_lightning.parts_again import HeldFit
from lastgasp_lightning.sharded import META, OWN


def test_its_files_are_those_that_were_dumped(tmp_path: Path) -> None:
    fit = SimpleNamespace(number=lambda: 2, fit=SimpleNamespace(model="net"))
    config = GaspConfig.resolve(tmp_path)
    run: Any = SimpleNamespace(fit=fit, config=config)
    groups = [[{"lr": 0.1}]]
    more = Leaving(run).dumped(({"global_step": 8}, {"param_groups": groups, "small": {1: b"others"}}))
    place = place_in_job(0, 2, data_parallel(2), lambda value: value)
    arena = Arena()
    try:
        held = HeldFit(arena, ManifestWriter("lightning", place), config, 2, more)
        kept = held.kept(8)
        assert (kept.step, kept.groups) == (8, groups)
        files = held.beside(kept, held.dump_small(kept), {0: b"own"})
        assert files == {META: {"global_step": 8}, OWN: {"param_groups": groups, "small": {0: b"own"}}}
        assert held.target(8).parent == tmp_path and "step=00000008" in held.target(8).name
        assert held.capture(8) == b""
    finally:
        arena.close()
