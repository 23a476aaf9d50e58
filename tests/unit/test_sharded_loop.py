"""What was left in an arena is looked at before training begins with it."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lastgasp.errors import DeadlineExceeded
from lastgasp.pytorch.loop.sharded_loop import ShardedLoop
from lastgasp.pytorch.sharded.shards import Shards, host_memory

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
