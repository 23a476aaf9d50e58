"""Expert parallelism: two optimizers make one step, which ranks hold what, and whose file has which part."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'lastgasp[megatron]'")

from lastgasp.adapter import ManifestWriter  # noqa: E402
from lastgasp.adapter.arenas import Wanted  # noqa: E402
from lastgasp.config import GaspConfig  # noqa: E402
from lastgasp.errors import ConfigError  # noqa: E402
from lastgasp.topology import Place  # noqa: E402
from lastgasp_megatron.compose import Composer  # noqa: E402
from lastgasp_megatron.devices import Device  # noqa: E402
from lastgasp_megatron.image import Image, problem  # noqa: E402
from lastgasp_megatron.merge import layout_of, weights_of_merged  # noqa: E402
from lastgasp_megatron.settings import refuse  # noqa: E402
from lastgasp_megatron.shards import held_of  # noqa: E402
from lastgasp_megatron.source import MegatronSource  # noqa: E402
from lastgasp_megatron.state import check_optimizer  # noqa: E402
from lastgasp_megatron.steps import Boundary, Built, Steps  # noqa: E402
from lastgasp_megatron.topology import Shard, grouped  # noqa: E402
from lastgasp_megatron.writing import passed_on  # noqa: E402
from support.megatron.images import payload  # noqa: E402
from support.megatron.slices import KIND, optimizers  # noqa: E402

STEP = 7


# -- a step ---------------------------------------------------------------------------------------


class Inner:
    """As apex's FusedAdam; says when it is stepped."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said, self.fails = name, said, False
        self.param_groups: list[dict[str, Any]] = [{"params": [], "step": 0}]
        self.state: dict[Any, Any] = {}

    def step(self) -> str:
        if self.fails:
            raise RuntimeError("half of it")
        self.param_groups[0]["step"] += 1
        self.said.append(self.name)
        return self.name


class Chain:
    """As Megatron's: behind each inner step the weights are gathered, where a dead peer may be met."""

    def __init__(self, said: list[str]) -> None:
        self.chained_optimizers = [SimpleNamespace(optimizer=Inner(name, said)) for name in ("dense", "experts")]
        self.said, self.peer_is_dead = said, False

    def step(self) -> None:
        for one in self.chained_optimizers:
            assert one.optimizer.step() == one.optimizer.name
            if self.peer_is_dead:
                raise RuntimeError("Connection closed by peer")
            self.said.append("gather")


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch) -> tuple[Chain, Steps, Any]:
    monkeypatch.setattr(Steps, "_samples", lambda self: 4)
    said: list[str] = []
    optimizer = Chain(said)
    router = torch.nn.Module()
    router.register_buffer("expert_bias", torch.zeros(4))
    router.register_buffer("tokens", torch.ones(4), persistent=False)
    steps = Steps(
        Built(SimpleNamespace(iteration=0, curr_iteration=0), [router], optimizer, None),
        capture=lambda step, settled: None,
        before_update=lambda: said.append("updating"),
        step_completed=lambda step: said.append(f"end {step}"),
    )
    steps.install()
    return optimizer, steps, router


def test_both_optimizers_make_their_step_before_anything_is_gathered(chain: Any) -> None:
    optimizer, steps, _ = chain
    for step in (1, 2):
        optimizer.said.clear()
        steps.iteration_begin()
        optimizer.step()
        assert optimizer.said == ["updating", "dense", "experts", f"end {step}", "gather", "gather"]
        assert steps.boundary.adam == (step, step) == steps.counted()


def test_a_peer_that_dies_between_the_two_leaves_a_whole_step(chain: Any) -> None:
    optimizer, steps, _ = chain
    optimizer.peer_is_dead = True
    with pytest.raises(RuntimeError, match="closed by peer"):
        optimizer.step()
    assert (steps.step, steps.inside, steps.counted()) == (1, False, (1, 1))
    optimizer.peer_is_dead = False
    steps.iteration_begin()
    optimizer.step()
    assert (steps.step, steps.counted()) == (2, (2, 2)), "what was made ahead counts for its own iteration only"


def test_an_update_of_one_alone_is_between_two_steps(chain: Any) -> None:
    optimizer, steps, _ = chain
    optimizer.chained_optimizers[1].optimizer.fails = True
    with pytest.raises(RuntimeError, match="half"):
        optimizer.step()
    assert (steps.step, steps.inside) == (0, True)


def test_a_routers_bias_is_saved_as_it_was_at_the_end_of_the_step(chain: Any) -> None:
    optimizer, steps, router = chain
    router.expert_bias += 1
    optimizer.step()
    router.expert_bias += 1  # as finalize_model_grads does, before the next update
    router.state_dict_for_save_checkpoint = router.state_dict
    shard = Shard(tensor=0, pipeline=0, part=0, parts=1, data_ranks=(0,))
    built = Built(SimpleNamespace(iteration=0), [router], SimpleNamespace(is_stub_optimizer=True), None)
    steps.iteration_begin()
    model = Composer(built, shard).compose(steps.boundary, {})["model"]
    assert model.keys() == {"expert_bias"} and torch.equal(model["expert_bias"], torch.ones(4))


# -- who holds what -------------------------------------------------------------------------------


def shard(rank: int, ranks: int = 4, instances: int = 1, sliced: bool = True) -> Shard:
    """Of one of `ranks` data parallel ones with expert parallel size 2, as Megatron orders them."""
    parts = ranks // instances
    return Shard(
        tensor=0, pipeline=0, part=rank % parts if sliced else 0, parts=parts if sliced else 1,
        data_ranks=tuple(range(ranks)), expert=rank % 2, experts=2,
        expert_part=rank // 2 % max(1, parts // 2) if sliced else 0,
        expert_parts=max(1, parts // 2) if sliced else 1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "groups", "writers"),
    [
        ({"sliced": False}, ((0, 2), (1, 3)), [0, 1, 2, 3]),
        ({"sliced": False, "ranks": 2}, ((0,), (1,)), [0, 1]),
        ({}, ((0,), (1,), (2,), (3,)), [0, 1]),
        ({"instances": 2}, ((0, 2), (1, 3)), [0, 1, 2, 3]),
    ],
    ids=["plain", "plain-two-ranks", "one-instance", "two-instances"],
)
def test_replicas_have_the_same_slices_and_experts(options: dict[str, Any], groups: Any, writers: list[int]) -> None:
    found = [shard(rank, **options) for rank in range(options.get("ranks", 4))]
    assert grouped([(one.key, one.folder, one.writes) for one in found]) == groups
    assert [rank for rank, one in enumerate(found) if one.writes] == writers


def test_a_file_without_one_writer_is_refused() -> None:
    with pytest.raises(ConfigError, match="one first slice for each file"):
        grouped([((0,), (0,), True), ((1,), (0,), True)])
    with pytest.raises(ConfigError, match="one first slice for each file"):
        grouped([((0,), (0,), True), ((1,), (1,), False)])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"expert_tensor_parallel_size": 1, "tensor_model_parallel_size": 2}, "--expert-tensor-parallel-size=1"),
        (
            {"expert_model_parallel_size": 2, "use_distributed_optimizer": True, "use_gloo_process_groups": False},
            "--disable-gloo-process-groups",
        ),
        ({"moe_single_grouped_weight": True}, "--moe-single-grouped-weight"),
    ],
)
def test_what_was_not_run_with_experts_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        refuse(SimpleNamespace(num_experts=4, **given))


# -- files ----------------------------------------------------------------------------------------


def image(rank: int) -> Image:
    """Of one of two ranks: all but the experts is cut in two, the experts of a rank are its own."""
    mine, folder = shard(rank, ranks=2), f"iter_{STEP:07d}/mp_rank_00_{rank:03d}"
    parts = optimizers(2)[2][rank], optimizers(1)[2][0]
    for tensors in parts[1].optimizer.state.values():
        tensors["exp_avg"].fill_(rank + 1.0)
    model = {
        f"{kind} {i}": weight
        for place, kind in enumerate(("shared", "expert"))
        for i, weight in enumerate(weights_of_merged(parts[place], place).values())
    }
    return Image(
        rank=rank, shard=mine, step=STEP, file=f"{folder}/model_optim_rng.pt",
        content={"model": model, "args": SimpleNamespace(no_save_rng=True)},
        held=tuple(held_of(one, cut.parts) for one, cut in zip(parts, mine.cuts, strict=True)),
        layouts=tuple(layout_of(one) for one in parts), aux=b"random", looked=True,
    )  # fmt: skip


def test_slices_are_passed_on_where_others_need_them() -> None:
    first, second = image(0), image(1)
    assert passed_on(first, {first.shard.folder}) == ["tensor-0-pipeline-0-part-0"]
    assert passed_on(second, {second.shard.folder}) == ["tensor-0-pipeline-0-part-1"]
    assert passed_on(first, {first.shard.folder, second.shard.folder}) == []
    assert passed_on(second, ()) == ["tensor-0-pipeline-0-part-1", "tensor-0-pipeline-0-expert-1-part-0"]


def source_of(rank: int, folder: Path) -> Any:
    place = Place(rank=rank, world_size=2, replicas=((0,), (1,)))
    steps: Any = SimpleNamespace(boundary=Boundary(STEP, 0, 0, None, (), ()), inside=True, step=STEP)
    composer: Any = SimpleNamespace(optimizer=None, shard=shard(rank, ranks=2))
    random: Any = SimpleNamespace(read=lambda step: b"random")
    writer, config = ManifestWriter("megatron", place), GaspConfig(directory=folder)
    return MegatronSource(steps, random, composer, Device(torch.device("cpu")), writer, config)


def check_files(folder: Path) -> None:
    """As Megatron's chain of optimizers saves them: each rank those whose first slice it has."""
    _, weights, _ = optimizers(2)
    for rank in (0, 1):
        home = folder / f"iter_{STEP:07d}/mp_rank_00_{rank:03d}"
        dense, experts = torch.load(home / "distrib_optim.pt", weights_only=False)
        assert (dense is None) == (rank == 1)
        assert rank == 1 or torch.equal(dense[0][KIND]["exp_avg_sq"], weights.square() * 3)
        assert torch.equal(experts[0][KIND]["param"], weights)
        assert torch.equal(experts[0][KIND]["exp_avg"], torch.full_like(weights, rank + 1.0))
        model = torch.load(home / "model_optim_rng.pt", weights_only=False)["model"]
        for kind in ("shared", "expert"):
            assert torch.equal(torch.cat([model[f"{kind} {i}"] for i in range(3)]), weights.to(torch.bfloat16))
    assert not list(folder.glob(".gasp-*")), "slices were left"


def test_one_rank_writes_the_files_of_both(tmp_path: Path) -> None:
    source = source_of(1, tmp_path)
    arenas = {rank: payload(image(rank)) for rank in (0, 1)}
    result = source.save_shards(STEP, {}, "test", Wanted(own=False, arenas=arenas, common=0))
    source.publish(result, {1: result.part})
    check_files(tmp_path)


def test_two_ranks_write_a_file_each_of_what_both_pass_on(tmp_path: Path) -> None:
    first, second = source_of(0, tmp_path), source_of(1, tmp_path)
    results: dict[int, Any] = {}

    def write(rank: int, source: Any) -> None:
        wanted = Wanted(own=False, arenas={rank: payload(image(rank))}, common=0)
        results[rank] = source.save_shards(STEP, {}, "", wanted)

    other = threading.Thread(target=write, args=(1, second))
    other.start()
    write(0, first)
    other.join(30)
    first.publish(results[0], {rank: result.part for rank, result in results.items()})
    check_files(tmp_path)


def test_a_stage_without_experts_has_one_optimizer_and_a_file_for_each_place(tmp_path: Path) -> None:
    """Megatron writes that optimizer with the first place alone."""
    images = []
    for rank in (0, 1):
        whole = image(rank)
        mine = replace(whole.shard, has_experts=False)
        assert (mine.writes, len(mine.cuts)) == (True, 1)
        assert whole.content is not None
        model = {name: one for name, one in whole.content["model"].items() if name.startswith("shared")}
        images.append(replace(
            whole, shard=mine, held=whole.held[:1], layouts=whole.layouts[:1], content=whole.content | {"model": model}
        ))  # fmt: skip
    assert passed_on(images[1], {images[1].shard.folder}) == ["tensor-0-pipeline-0-part-1"]
    source = source_of(1, tmp_path)
    arenas = {rank: payload(one) for rank, one in enumerate(images)}
    result = source.save_shards(STEP, {}, "test", Wanted(own=False, arenas=arenas, common=0))
    source.publish(result, {1: result.part})
    first, second = (tmp_path / f"iter_{STEP:07d}/mp_rank_00_{rank:03d}" for rank in (0, 1))
    _, weights, _ = optimizers(2)
    assert torch.equal(torch.load(first / "distrib_optim.pt", weights_only=False)[0][KIND]["param"], weights)
    assert not (second / "distrib_optim.pt").exists()
    for home in (first, second):
        model = torch.load(home / "model_optim_rng.pt", weights_only=False)["model"]
        assert torch.equal(torch.cat([model[f"shared {i}"] for i in range(3)]), weights.to(torch.bfloat16))


def test_a_chain_of_other_optimizers_is_not_taken_for_that_of_experts() -> None:
    """As of muon, which is one for matrices and one for all else."""
    groups: list[dict[str, Any]] = [{"is_expert_parallel": False}, {"is_expert_parallel": False}]
    inner = [SimpleNamespace(param_groups=[group]) for group in groups]
    chain = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=one, gbuf_ranges=[]) for one in inner])
    with pytest.raises(ConfigError, match="Train without several optimizers"):
        check_optimizer(chain, 2)
    groups[1]["is_expert_parallel"] = True
    check_optimizer(chain, 2)


def test_what_cannot_be_the_experts_state_is_not_saved() -> None:
    one = image(0)
    one.held[1][0][KIND][0].pieces[0][2]["exp_avg"][0] = float("nan")
    assert "exp_avg" in problem(one)
