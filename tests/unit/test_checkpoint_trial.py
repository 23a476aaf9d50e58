"""A checkpoint that verifies and does not load: all ranks go on to the next, and nothing is moved before one loads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from traceback import StackSummary

import msgspec
import pytest
from torch.distributed.checkpoint.api import CheckpointException

from lastgasp.checkpoint import Candidate, candidates, verify
from lastgasp.checkpoint.quarantine import Reason
from lastgasp.checkpoint.trial import Trial, is_about_content
from lastgasp.errors import (
    CheckpointError,
    CheckpointMismatch,
    ConfigError,
    ControlError,
    DeadlineExceeded,
    NothingLoads,
)
from lastgasp.ports import Gather
from support.checkpoint_kit import FOLDERS, as_ranks, put_folder

Load = Callable[[int, int], None]
"""Given rank and step: raises what the framework raises."""


@dataclass
class Outcome:
    """What one rank saw."""

    step: int | None
    tried: list[int] = field(default_factory=list)


def start(directory: Path, load: Load, world_size: int = 2) -> list[Outcome]:
    """All ranks load; rank 0 sets aside."""

    def body(rank: int, gather: Gather) -> Outcome:
        trial, outcome = Trial(gather), Outcome(None)
        found = candidates([directory], FOLDERS)

        def choose(but: Collection[Path]) -> Candidate | None:
            return next((c for c in found if c.path not in but), None)

        def call(candidate: Candidate) -> None:
            assert candidate.step is not None
            outcome.tried.append(candidate.step)
            load(rank, candidate.step)

        loaded = trial.load(choose, call)
        outcome.step = None if loaded is None else loaded.step
        if rank == 0:
            trial.set_aside()
        return outcome

    return as_ranks(world_size, body)


def stored(directory: Path) -> Path:
    for step in (3, 5, 7):
        put_folder(directory, step)
    return directory


def unfit(*steps: int) -> Load:
    def load(rank: int, step: int) -> None:
        if step in steps:
            raise RuntimeError("size mismatch for weight: [4] and [8]\nand more")

    return load


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if not path.name.startswith(".")}


def test_the_newest_loads(tmp_path: Path) -> None:
    before = names(stored(tmp_path))
    assert start(tmp_path, unfit()) == [Outcome(7, [7])] * 2
    assert names(tmp_path) == before


def test_what_does_not_load_is_set_aside_with_its_reason_once_another_has_loaded(tmp_path: Path) -> None:
    assert start(stored(tmp_path), unfit(7, 5)) == [Outcome(3, [7, 5, 3])] * 2
    assert [c.step for c in candidates([tmp_path], FOLDERS)] == [3]
    for step in (5, 7):
        home = tmp_path / f"iter_{step:07d}.unfit"
        reason = msgspec.json.decode(home.with_name(f"{home.name}.reason.json").read_bytes(), type=Reason)
        assert (reason.step, reason.reasons) == (
            step, ["ranks 0-1: does not load: RuntimeError: size mismatch for weight: [4] and [8] and more"],
        )  # fmt: skip
        for suffix in ("", ".manifest.json"):  # a job that it fits gets it back by its name
            home.with_name(home.name + suffix).rename(tmp_path / f"iter_{step:07d}{suffix}")
        assert verify(tmp_path / f"iter_{step:07d}", FOLDERS).ok


def test_a_model_that_was_changed_leaves_everything_where_it_is(tmp_path: Path) -> None:
    before = names(stored(tmp_path))
    with pytest.raises(NothingLoads, match=r"3 of them verify; nothing was moved:\n.*iter_0000007: ranks 0-1: "):
        start(tmp_path, unfit(3, 5, 7))
    assert names(tmp_path) == before


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert start(tmp_path, unfit(7)) == [Outcome(None)] * 2


def test_an_error_on_some_ranks_only_says_nothing_about_a_checkpoint(tmp_path: Path) -> None:
    before = names(stored(tmp_path))
    seen: dict[int, type[BaseException]] = {}

    def load(rank: int, step: int) -> None:
        if rank == 1:
            raise RuntimeError("a flipped bit in this one's memory")

    def body(rank: int, gather: Gather) -> None:
        newest = candidates([tmp_path], FOLDERS)[0]
        try:
            Trial(gather).load(lambda but: newest, lambda candidate: load(rank, 7))
        except Exception as error:
            seen[rank] = type(error)

    as_ranks(2, body)
    assert seen == {0: CheckpointError, 1: RuntimeError}
    assert names(tmp_path) == before


class OutOfMemory(MemoryError):
    pass


@pytest.mark.parametrize("error", [OutOfMemory("no"), OSError(5, "flaky"), ConfigError("a", 1, "b", "c")])
def test_an_error_of_the_machine_is_raised_at_once(error: Exception, tmp_path: Path) -> None:
    before, asked = names(stored(tmp_path)), threading.Event()

    def gather(tag: str, payload: bytes) -> list[bytes]:
        asked.set()
        return [payload]

    def load(candidate: Candidate) -> None:
        raise error

    with pytest.raises(type(error)):
        Trial(gather).load(lambda but: candidates([tmp_path], FOLDERS)[0], load)
    assert not asked.is_set() and names(tmp_path) == before


@pytest.mark.parametrize("other", [None, OSError(5, "flaky"), KeyboardInterrupt()])
def test_torchs_exception_of_all_ranks_is_what_they_have_raised(other: BaseException | None, tmp_path: Path) -> None:
    """It is no Exception, and DCP raises it for whatever goes wrong."""
    stored(tmp_path)
    errors: dict[int, BaseException] = {1: KeyError("no such tensor")} | ({0: other} if other else {})
    failures = {rank: (error, StackSummary()) for rank, error in errors.items()}

    def load(candidate: Candidate) -> None:
        if candidate.step == 7:
            raise CheckpointException("load", failures)

    def choose(but: Collection[Path]) -> Candidate | None:
        return next(c for c in candidates([tmp_path], FOLDERS) if c.path not in but)

    trial = Trial(lambda tag, payload: [payload])
    if other is not None:
        with pytest.raises(CheckpointException):
            trial.load(choose, load)
        return
    loaded = trial.load(choose, load)
    assert loaded is not None and loaded.step == 5
    assert [reasons for _, reasons in trial.refused] == [["rank 0: does not load: KeyError: 'no such tensor'"]]


@pytest.mark.parametrize("lost", [ControlError("rank 1 is gone"), DeadlineExceeded("all", 1.0, "Look.")])
def test_where_the_others_do_not_answer_the_frameworks_own_error_is_raised(lost: Exception, tmp_path: Path) -> None:
    stored(tmp_path)

    def gather(tag: str, payload: bytes) -> list[bytes]:
        raise lost

    def choose(but: Collection[Path]) -> Candidate:
        return candidates([tmp_path], FOLDERS)[0]

    with pytest.raises(RuntimeError, match="size mismatch"):
        Trial(gather).load(choose, lambda candidate: unfit(7)(0, 7))
    with pytest.raises(type(lost)):
        Trial(gather).load(choose, lambda candidate: None)


def test_what_speaks_of_the_content() -> None:
    spoken = (RuntimeError("x"), KeyError("x"), AssertionError(), CheckpointMismatch("p", ["d"]))
    silent = (FileNotFoundError(), ModuleNotFoundError(), ControlError("x"), KeyboardInterrupt(), SystemExit(1))
    assert [is_about_content(error) for error in (*spoken, *silent)] == [True] * 4 + [False] * 5
