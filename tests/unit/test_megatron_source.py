"""What a rank refuses to write: a step that is not its own, or one that an update has touched."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'lastgasp[megatron]'")

from lastgasp.adapter import ManifestWriter  # noqa: E402
from lastgasp.adapter.arenas import Wanted  # noqa: E402
from lastgasp.config import GaspConfig  # noqa: E402
from lastgasp.errors import NotSaveable  # noqa: E402
from lastgasp.topology import Place  # noqa: E402
from lastgasp_megatron.compose import Composer as RealComposer  # noqa: E402
from lastgasp_megatron.devices import Device  # noqa: E402
from lastgasp_megatron.source import MegatronSource  # noqa: E402
from lastgasp_megatron.steps import Boundary, Built  # noqa: E402
from lastgasp_megatron.topology import Shard  # noqa: E402
from support.megatron.images import image, payload  # noqa: E402
from support.megatron.slices import KIND, optimizers  # noqa: E402

STEP = 7


class Steps:
    """As `steps.Steps`: completed step, update under way, what Adam counts."""

    def __init__(self) -> None:
        self.step, self.inside, self.adam, self.settled, self.updated = STEP, False, STEP, True, True
        self.boundary = Boundary(STEP, 56, 0, None, (None,), (STEP,))

    def counted(self) -> tuple[int, ...]:
        return (self.adam,)

    def cut_short(self) -> bool:
        return False

    def moved_on(self) -> str:
        return ""

    def extra_moved_on(self) -> str:
        return ""

    def logged_late(self) -> str:
        return ""


class Composer:
    """Calls `meanwhile` while it builds the state."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, optimizer: Any, shard: Shard) -> None:
        self.optimizer, self.shard = optimizer, shard

    def compose(self, boundary: Boundary, weights: Any) -> dict[str, Any]:
        self.meanwhile()
        return {"iteration": boundary.step, "args": SimpleNamespace(no_save_rng=True)}


def source_of(rank: int, folder: Path) -> tuple[Any, Any, Any]:
    """The source of one of two ranks, its steps, and its composer."""
    place = Place(rank=rank, world_size=2, replicas=((0,), (1,)))
    shard = Shard(tensor=0, pipeline=0, part=0, parts=1, data_ranks=(0,))
    steps, composer = Steps(), Composer(SimpleNamespace(optimizer=SimpleNamespace(param_groups=[], state={})), shard)
    random: Any = SimpleNamespace(read=lambda step: b"random")
    one: Any = SimpleNamespace(steps=steps, composer=composer)
    source: Any = MegatronSource(
        one.steps, random, one.composer, Device(torch.device("cpu")), ManifestWriter("megatron", place),
        GaspConfig(directory=folder),
    )  # fmt: skip
    return source, steps, composer


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(
        "lastgasp_megatron.source.file_in_checkpoint", lambda step: f"iter_{step:07d}/mp_rank_00/model_optim_rng.pt"
    )
    source, steps, composer = source_of(0, tmp_path)
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
        ({"adam": STEP + 1}, STEP, "has made 8 updates, not 7"),
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


# -- from arenas ----------------------------------------------------------------------------------


def arena_of(part: int, **more: Any) -> memoryview:
    return payload(image(part, 2, args=SimpleNamespace(no_save_rng=True), **more))


def check_files(folder: Path) -> None:
    _, weights, _ = optimizers(2)
    where = folder / f"iter_{STEP:07d}/mp_rank_00"
    world = torch.load(where / "distrib_optim.pt", weights_only=False)[0][KIND]
    assert torch.equal(world["param"], weights) and torch.equal(world["exp_avg_sq"], weights.square() * 3)
    model = torch.load(where / "model_optim_rng.pt", weights_only=False)["model"]
    assert torch.equal(torch.cat([model[str(i)] for i in range(3)]), weights.to(torch.bfloat16))
    assert not list(folder.glob(".gasp-*")), "slices were left"


def test_one_rank_writes_all_from_arenas_though_it_holds_another_step_itself(tmp_path: Path) -> None:
    source, steps, _ = source_of(1, tmp_path)
    steps.inside = True
    wanted = Wanted(own=False, arenas={1: arena_of(1), 0: arena_of(0)}, common=0)
    result = source.save_shards(STEP, {}, "test", wanted)
    source.publish(result, {1: result.part})
    check_files(tmp_path)


def test_two_ranks_write_an_arena_each_and_meet(tmp_path: Path) -> None:
    (first, *_), (second, *_) = source_of(0, tmp_path), source_of(1, tmp_path)
    results: dict[int, Any] = {}
    other = threading.Thread(
        target=lambda: results.update({1: second.save_shards(STEP, {}, "", Wanted(False, {1: arena_of(1)}, 0))})
    )
    other.start()
    results[0] = first.save_shards(STEP, {}, "", Wanted(own=False, arenas={0: arena_of(0)}, common=0))
    other.join(30)
    first.publish(results[0], {rank: result.part for rank, result in results.items()})
    check_files(tmp_path)


def test_a_slice_is_removed_with_the_plan_that_it_was_written_for(tmp_path: Path) -> None:
    source, *_ = source_of(1, tmp_path)
    result = source.save_shards(STEP, {}, "", Wanted(own=False, arenas={1: arena_of(1)}, common=0))
    assert [path.name[:6] for path in tmp_path.iterdir()] == [".gasp-"]
    source.discard(result)
    assert list(tmp_path.iterdir()) == []


def test_random_states_of_the_order_come_before_those_of_the_arena(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lastgasp_megatron.compose.native", lambda data: data)
    arenas = {0: payload(image(0, 1, args=SimpleNamespace()))}
    for number, (given, expected) in enumerate([({}, b"random"), ({0: b""}, b"random"), ({0: b"settled"}, b"settled")]):
        folder = tmp_path / str(number)
        source, *_ = source_of(1, folder)
        result = source.save_shards(STEP, given, "", Wanted(own=False, arenas=arenas, common=0))
        source.publish(result, {1: result.part})
        path = folder / f"iter_{STEP:07d}/mp_rank_00/model_optim_rng.pt"
        assert torch.load(path, weights_only=False)["rng_state"] == [expected]


def test_a_payload_that_cannot_be_made_costs_the_arena_alone(rank: SimpleNamespace) -> None:
    source, composer = rank.source, rank.composer
    boundary = Boundary(STEP, 56, 0, None, (None,), (STEP,))
    assert source.payload(boundary)
    composer.meanwhile = lambda: 1 / 0
    with pytest.raises(ValueError, match="division by zero"):
        source.payload(boundary)
    source.unsound = "swapped out"
    with pytest.raises(ValueError, match="swapped out"):
        source.payload(boundary)


@pytest.mark.parametrize("format", ["torch", "torch_dist"])
def test_how_modelopt_has_changed_the_model_is_saved_or_nothing_is(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it a quantized model would come back as an ordinary one."""
    changes = dict[str, Any]()
    module = SimpleNamespace(has_nvidia_modelopt=True, unwrap_model=lambda model: model)
    module.save_modelopt_state = lambda model, state: state.update(changes)
    monkeypatch.setitem(sys.modules, "megatron.training.checkpointing", cast(Any, module))
    built = Built(SimpleNamespace(ckpt_format=format), [], SimpleNamespace(is_stub_optimizer=True), None)
    boundary = Boundary(step=5, consumed=0, skipped=0, scheduler=None, scalers=(), adam=())
    compose = partial(RealComposer(built, cast(Any, None)).compose, boundary, {})
    assert "modelopt_state" not in compose()
    changes["modelopt_state"] = "quantized"
    if format == "torch":
        assert compose()["modelopt_state"] == "quantized"
    else:
        with pytest.raises(NotSaveable, match=r"--ckpt-format torch$"):
            compose()
