"""What a rank refuses to write: a step that is not its own, or one that an update has touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'lastgasp[megatron]'")

from lastgasp.adapter import ManifestWriter  # noqa: E402
from lastgasp.config import GaspConfig  # noqa: E402
from lastgasp.errors import NotSaveable  # noqa: E402
from lastgasp.topology import Place  # noqa: E402
from lastgasp_megatron.devices import Device  # noqa: E402
from lastgasp_megatron.source import MegatronSource  # noqa: E402
from lastgasp_megatron.steps import Boundary  # noqa: E402
from lastgasp_megatron.topology import Shard  # noqa: E402

STEP = 7


class Steps:
    """As `steps.Steps`: completed step, update under way, what Adam counts."""

    def __init__(self) -> None:
        self.step, self.inside, self.adam, self.settled, self.updated = STEP, False, STEP, True, True
        self.boundary = Boundary(STEP, 56, 0, None, None, STEP)

    def counted(self) -> int:
        return self.adam


class Composer:
    """Calls `meanwhile` while it builds the state."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, optimizer: Any, shard: Shard) -> None:
        self.optimizer, self.shard = optimizer, shard

    def compose(self, boundary: Boundary, weights: Any) -> dict[str, Any]:
        self.meanwhile()
        return {"iteration": boundary.step, "args": SimpleNamespace(no_save_rng=True)}


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(
        "lastgasp_megatron.source.file_in_checkpoint", lambda step: f"iter_{step:07d}/mp_rank_00/model_optim_rng.pt"
    )
    place = Place(rank=0, world_size=1, replicas=((0,),))
    shard = Shard(tensor=0, pipeline=0, part=0, parts=1, data_ranks=(0,))
    nothing_held = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[], state={}))
    steps, composer = Steps(), Composer(nothing_held, shard)
    random: Any = SimpleNamespace(read=lambda step: b"random")
    one: Any = SimpleNamespace(steps=steps, composer=composer)
    source: Any = MegatronSource(
        one.steps, random, one.composer, Device(torch.device("cpu")), ManifestWriter("megatron", place),
        GaspConfig(directory=tmp_path),
    )  # fmt: skip
    return SimpleNamespace(steps=steps, composer=composer, source=source, folder=tmp_path)


def test_the_current_step_is_written_and_published(rank: SimpleNamespace) -> None:
    result = rank.source.save(STEP, {}, "test")
    rank.source.publish(result, {0: result.part})
    path = rank.folder / f"iter_{STEP:07d}/mp_rank_00/model_optim_rng.pt"
    assert torch.load(path, weights_only=False)["iteration"] == STEP
    assert (rank.folder / "latest_checkpointed_iteration.txt").read_text() == str(STEP)


@pytest.mark.parametrize(
    ("change", "step", "reason"),
    [
        ({"inside": True}, STEP, "the update after step 7 has begun"),
        ({}, STEP - 1, "is at step 7, not at 6"),
        ({}, STEP + 1, "is at step 7, not at 8"),
        ({"adam": STEP + 1}, STEP, "the optimizer has made 8 updates, not 7"),
    ],
)
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_another_step_is_refused(
    rank: SimpleNamespace, change: dict[str, Any], step: int, reason: str, when: str
) -> None:
    if when == "before" or not change:
        vars(rank.steps).update(change)
    else:
        rank.composer.meanwhile = lambda: vars(rank.steps).update(change)
    with pytest.raises(NotSaveable, match=reason):
        rank.source.save(step, {}, "test")
    assert list(rank.folder.iterdir()) == [], "something was left"
