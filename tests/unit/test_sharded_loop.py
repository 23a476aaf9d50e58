"""Loops whose ranks hold parts: what was left in an arena, periodic checkpoints, a training that is entered again."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lastgasp.errors import DeadlineExceeded
from lastgasp.pytorch.loop import engine_loop, sharded_loop
from lastgasp.pytorch.loop.again_here import AgainHere
from lastgasp.pytorch.loop.engine_loop import EngineLoop
from lastgasp.pytorch.loop.kept_objects import KeptObjects
from lastgasp.pytorch.loop.record import KEY, SHARDED_FILE
from lastgasp.pytorch.loop.run import Run
from lastgasp.pytorch.loop.sharded_loop import ShardedLoop
from lastgasp.pytorch.loop.shards_again import ShardsAgain
from lastgasp.pytorch.sharded.shards import Shards, host_memory
from lastgasp.pytorch.sharded_alike import SharedParts

HERE = "training 0 in ckpts"


class _Schedule:
    """One that pickles, and needs what the new process does not have."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, ("/no/such/table",)


def _open(path: str) -> bytes:
    return Path(path).read_bytes()


@pytest.mark.parametrize(
    ("more", "refusal"),
    [
        ((HERE, {"epoch": 1}), ""),
        (("training 1 in ckpts", {}), "it is of training 1 in ckpts, and this is training 0 in ckpts"),
        ((HERE, {"schedule": _Schedule()}), "schedules, scaler or extra cannot be unpickled: FileNotFoundError: "),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused_with_its_reason(more: Any, refusal: str) -> None:
    loop: Any = object.__new__(ShardedLoop)
    loop.__dict__["_run"] = SimpleNamespace(fit=SimpleNamespace(number=0))
    loop.__dict__["config"] = SimpleNamespace(directory="ckpts")
    found = loop._why_not(SimpleNamespace(more=pickle.dumps(more)))
    assert found.startswith(refusal) and bool(found) == bool(refusal)
    if not refusal:
        assert loop._small == {"epoch": 1}


def test_a_rank_that_is_late_for_a_periodic_checkpoint_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait may take as long as ranks may go without progress."""
    loop: Any = object.__new__(ShardedLoop)
    asked: list[str] = []

    def gather(tag: str, own: bytes, seconds: float) -> list[bytes]:
        asked.append(tag)
        raise DeadlineExceeded("all ranks", seconds, "Look at the slowest rank.")

    engine = SimpleNamespace(progress=lambda phase: None, gather=gather, status=SimpleNamespace(durable=0))
    layout = SimpleNamespace(periodic_path=lambda *_: Path("ckpts/periodic"))
    config = SimpleNamespace(directory="ckpts", save_timeout=1.0)
    loop.__dict__["_run"] = SimpleNamespace(
        engine=engine, state=SimpleNamespace(layout=layout), config=config,
        fit=SimpleNamespace(number=0), place=SimpleNamespace(replicas=((0, 1),)),
    )  # fmt: skip
    monkeypatch.setattr(ShardedLoop, "rank", 1, raising=False)
    monkeypatch.setattr(ShardedLoop, "capture", lambda self, step: b"")
    loop.save_periodic(8)
    assert asked == ["loop/save/8"] and engine.status.durable == 0


class _Parts:
    """Of an engine whose second step cannot be pickled."""

    def __init__(self) -> None:
        self.extra_modules: dict[Any, Any] = {}
        self.now: Any = SimpleNamespace(objects=lambda: {"global_step1/mp_rank_00_model_states.pt": "of step 1"})
        self.looks = 0

    def look(self) -> bool:
        self.looks += 1
        if self.looks > 1:
            raise ValueError("values of the engine cannot be pickled: a lock")
        return True

    def states_of_one(self) -> dict[str, bytes]:
        return {}

    def shared(self) -> list[Any]:
        return []


@pytest.mark.parametrize("described_here", [False, True])
def test_files_of_an_earlier_step_are_in_no_periodic_checkpoint(
    described_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that cannot be described any more costs saves, not the training: whichever rank's it is."""
    written, notes, published = list[Any](), list[str](), list[Any]()

    def write(staged: Any, rank: int, files: Any) -> bytes:
        written.append(files)
        return b"x"

    monkeypatch.setattr(engine_loop, "_write", write)
    monkeypatch.setattr(sharded_loop, "part_of", lambda *_: b"part")
    staged = SimpleNamespace(discard=lambda: None, target=Path("t"))
    monkeypatch.setattr(sharded_loop, "Staged", lambda *_, **__: staged)
    monkeypatch.setattr(engine_loop, "counters", lambda engine: {})
    monkeypatch.setattr(EngineLoop, "capture", lambda self, step: b"aux")
    monkeypatch.setattr(EngineLoop, "merge", lambda *_: published.append(1))
    loop: Any = object.__new__(EngineLoop)
    session: Any = SimpleNamespace(note=notes.append, gather=lambda tag, own: [own])
    session.place = SimpleNamespace(replicas=((0,),))
    engine = SimpleNamespace(
        progress=lambda phase: None, status=SimpleNamespace(durable=0), session=session,
        gather=lambda tag, own, seconds: [own, b"" if described_here else own],
    )  # fmt: skip
    parts = _Parts()
    parts.looks -= 2 * described_here
    vars(loop).update(
        shards=parts, life=SimpleNamespace(session=session), arena=None, _kept={}, _cannot="",
        _shared=SharedParts(session, parts, kept_equal=False), _completed=True, _counters={}, rank=0, _filling=None,
        _extra_states=SimpleNamespace(step_over=lambda step: {}),
        _run=SimpleNamespace(
            engine=engine, config=SimpleNamespace(directory="ckpts", save_timeout=1.0, sha256=False), step=2,
            state=SimpleNamespace(
                layout=SimpleNamespace(periodic_path=lambda *_: Path("ckpts/p")), engine=None, models={}, optimizers={}
            ),
            fit=SimpleNamespace(number=0), place=SimpleNamespace(replicas=((0,), (1,))),
        ),
    )  # fmt: skip
    for step in (1, 2):
        loop.keep(SimpleNamespace(step=step, groups=[]))
    loop.save_periodic(2)
    assert len(written) == described_here and len(notes) == (not described_here)
    assert not published and engine.status.durable == 0
    if not described_here:
        assert loop._publish_periodic(staged, b"part", {0: b"part"}, {0: b"aux"}) == b""


def test_a_step_that_a_fault_has_cut_short_is_not_compared_with_the_others() -> None:
    """They stand in the rest of the loop's body, and wait for this rank, which reports its fault after that."""
    looks = iter([True])
    loop, run = object.__new__(ShardedLoop), object.__new__(Run)
    vars(loop).update(
        shards=SimpleNamespace(look=lambda: next(looks)), life=None, arena=None, _kept={}, _cannot="",
        _completed=False, _extra_states=SimpleNamespace(step_over=lambda step: {}), _run=run,
        _shared=SharedParts(None, None, kept_equal=False),
    )  # fmt: skip
    state: Any = SimpleNamespace(models={}, optimizers={})
    run.shards, run.state = loop, state
    snapshot: Any = SimpleNamespace(step=1, groups=[])
    run.finished(snapshot)
    assert not list(looks) and loop.kept(1) is snapshot


def test_under_join_ranks_come_to_steps_alone_and_compare_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = list[str]()
    monkeypatch.setattr(sharded_loop, "under_join", lambda state: True)
    loop = object.__new__(ShardedLoop)
    vars(loop).update(
        shards=None, life=SimpleNamespace(session=SimpleNamespace(note=notes.append)), arena=None, _kept={}, _cannot="",
        _completed=False, _extra_states=SimpleNamespace(step_over=lambda step: {}), _filling=None,
        _run=SimpleNamespace(state=None, capture_aux=lambda step, **_: None),
        _shared=SharedParts(None, None, kept_equal=False),
    )  # fmt: skip
    for step in (1, 2):
        snapshot: Any = SimpleNamespace(step=step, groups=[])
        loop.complete(snapshot)
    assert len(notes) == 1 and "under torch's Join" in notes[0]


def test_hooks_of_models_made_outside_are_there_once_around_shards_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a loop whose ranks hold all of the state: before that is filled."""
    done = list[str]()
    monkeypatch.setattr(KeptObjects, "enter", lambda self, state, note: done.append("objects"))
    again: Any = object.__new__(ShardsAgain)
    again._held = SimpleNamespace(again=None, life=None)
    again.run = SimpleNamespace(
        entry=SimpleNamespace(objects=object.__new__(KeptObjects), sessions=1), state=None,
        shards=SimpleNamespace(enter=lambda agreed, held: done.append("shards")), engine=SimpleNamespace(note=None),
    )  # fmt: skip
    assert again.fill() and done == ["objects", "shards"]


@pytest.mark.parametrize("entering", [False, True])
def test_what_was_held_is_held_on_while_hooks_of_the_user_s_precede_its_use(
    entering: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer dies while this rank, back in its fit, is in a collective of a callback's: it has no step yet."""
    kept = list[str]()
    monkeypatch.setattr(AgainHere, "__init__", lambda self, run, *_: setattr(self, "run", run))
    monkeypatch.setattr(AgainHere, "keep", lambda self, again: kept.append("this run's"))
    life = SimpleNamespace(
        before_again=lambda again: kept.append("what was held"), session=SimpleNamespace(status=SimpleNamespace())
    )
    run: Any = SimpleNamespace(life=life, shards=SimpleNamespace(entering=entering))
    order: Any = None
    for held in (SimpleNamespace(life=life), SimpleNamespace(life=None), None):
        again: Any = ShardsAgain(run, order, order, held)  # type: ignore[arg-type]
        again.keep(order)
    assert kept == ["this run's" if entering else "what was held", "this run's", "this run's"]


def test_a_device_s_state_takes_no_memory_of_the_host_before_a_copy_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without arenas nobody asks for one; and what cannot be pinned is copied all the same."""
    asked: list[Any] = []
    real = torch.empty

    def empty(*size: Any, **given: Any) -> Any:
        asked.append(given.get("pin_memory"))
        if given.get("pin_memory"):
            raise RuntimeError("no memory can be pinned")
        return real(*size, **given)

    monkeypatch.setattr(torch, "empty", empty)
    Shards({"m": nn.Linear(10, 10, bias=False, device="meta")}, {}, 0, 1)
    assert True not in asked
    assert host_memory(torch.zeros(3, dtype=torch.uint8)).shape == (3,)
    assert asked[-2:] == [True, None]


@pytest.mark.parametrize(("alike", "shared"), [(True, True), (False, True), (True, False)])
def test_a_checkpoint_of_replicas_that_differ_says_whose_values_it_has(
    alike: bool, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them will resume with those."""
    notes: list[str] = []
    place = SimpleNamespace(world_size=4, rank=0, replicas=((0, 2), (1, 3)))
    run = SimpleNamespace(
        place=place, not_saved=SimpleNamespace(notes=list), state=SimpleNamespace(extra={}),
        engine=SimpleNamespace(note=notes.append), buckets=SimpleNamespace(layouts={}),
    )  # fmt: skip
    loop: Any = object.__new__(ShardedLoop)
    vars(loop).update(_run=run, life=SimpleNamespace(alike=alike), _shared=SimpleNamespace(alike=shared))
    monkeypatch.setattr(sharded_loop, "notes_on", lambda *_: [])
    files = loop.beside(SimpleNamespace(notes=[]), {}, {})
    text = "the ranks did not hold the same when they were compared; this is what ranks 0, 1 held"
    wanted = [] if alike and shared else [text]
    assert notes == wanted and files[SHARDED_FILE][KEY]["notes"] == wanted
