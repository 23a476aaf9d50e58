"""What was left in an arena is looked at before training begins with it."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lastgasp.pytorch.loop.sharded_loop import ShardedLoop

pytest.importorskip("torch")

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
