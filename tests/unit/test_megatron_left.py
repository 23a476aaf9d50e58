"""What all ranks have left in arenas becomes a checkpoint of the training that it is of, and of no other one."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'lastgasp[megatron]'")

from lastgasp.adapter import GaspConfig  # noqa: E402
from lastgasp.arena import Arena  # noqa: E402
from lastgasp.gasp import messages as m  # noqa: E402
from lastgasp.ports import Gather  # noqa: E402
from lastgasp.topology import Place  # noqa: E402
from lastgasp_megatron.left import save_left  # noqa: E402
from lastgasp_megatron.trainings import Trainings, name_of  # noqa: E402
from support.checkpoint_kit import as_ranks  # noqa: E402
from support.megatron.images import image, payload  # noqa: E402

STEP = 7


def begin(directory: Path, training: str, number: int = 0) -> tuple[list[str], list[str]]:
    """Training `number` of `directory` begins, and step 7 of `training` was left; returns what is there, and notes."""
    notes = list[str]()

    def body(rank: int, gather: Gather) -> None:
        one = dataclasses.replace(image(rank, 2, args=SimpleNamespace(no_save_rng=True)), training=training)
        arena, data = Arena(os.urandom(16), rank), payload(one)
        arena.reserve(len(data))
        arena.copy(STEP, [data])
        there = m.ArenaRef(rank=rank, pid=os.getpid(), fd=arena.fd, identity=arena.identity)
        left = m.Left(step=STEP, durable=5, arena=there)
        place = Place(rank=rank, world_size=2, replicas=((0,), (1,)), attempt=1)
        session: Any = SimpleNamespace(
            place=place, has_controller=True, gather=gather, left=lambda: left, drop_left=lambda: None,
            note=notes.append,
        )  # fmt: skip
        try:
            save_left(session, place, GaspConfig(directory=directory), number)
        finally:
            arena.close()

    as_ranks(2, body)
    return sorted(path.name for path in directory.glob("iter_*") if path.is_dir()), notes


def test_it_becomes_a_checkpoint_of_its_training(tmp_path: Path) -> None:
    found, notes = begin(tmp_path, name_of(1, tmp_path), 1)
    assert (found, notes) == (["iter_0000007"], [])


@pytest.mark.parametrize(("of", "number"), [("b", 0), ("a", 1)])
def test_that_of_another_training_of_the_script_is_refused(tmp_path: Path, of: str, number: int) -> None:
    found, notes = begin(tmp_path / "a", name_of(number, tmp_path / of))
    assert not found
    why = f"it is of training {number} in {tmp_path / of}, and this is training 0 in {tmp_path / 'a'}"
    assert {*notes} == {f"step 7 was left in arenas, but training cannot begin with it ({why})"}


def test_trainings_are_counted_by_directory_and_not_by_entries(tmp_path: Path) -> None:
    trainings, found = Trainings(), list[int]()
    for name in ("a", "b", "a"):
        trainings.begins()
        found += [trainings.number(tmp_path / name) for entry in range(2)]
    assert found == [0, 0, 0, 0, 1, 1]
