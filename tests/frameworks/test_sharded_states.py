"""States of optimizers of many kinds, of models whose parameters are DTensors: described, written, and loaded again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lastgasp.checkpoint import Provenance, Staged
from lastgasp.errors import CheckpointMismatch, ConfigError, NotSaveable
from lastgasp.pytorch import sharded
from lastgasp.pytorch.extrastate import ExtraStates
from lastgasp.pytorch.loop.extras import Extras
from lastgasp.pytorch.sharded_alike import SharedParts
from lastgasp.pytorch.sharded_source import ShardedSource

Ranks = Callable[..., None]


@pytest.fixture
def as_rank() -> Iterator[Ranks]:
    """This process is that rank of two, whose collectives do nothing."""

    def become(rank: int, world_size: int = 2) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    yield become
    dist.destroy_process_group()


def _model(world_size: int = 2) -> nn.Module:
    names = (f"of_rank_{dist.get_rank()}",)  # torch remembers by the mesh which part is whose
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=names)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    for layer in model:
        for name, parameter in list(layer.named_parameters()):
            spread = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            layer.register_parameter(name, nn.Parameter(spread))
    return model


class Local(torch.optim.Optimizer):
    """Keeps its momentum as plain tensors, each rank its own part; a counter that looks like one; and what differs."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                state.setdefault("momentum", torch.zeros_like(p.to_local())).add_(p.grad.to_local())
                state.setdefault("calls", torch.zeros(1)).add_(1)
                state.setdefault("sums", torch.zeros(2)).add_(p.grad.to_local().sum())


def _grads(model: nn.Module, value: float) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, value, requires_grad=False)


def test_plain_tensors_that_are_parts_come_back_to_each_rank(tmp_path: Path, as_rank: Ranks) -> None:
    """Nothing of them says so but their shapes; a counter of one element is none, whatever parts there are."""
    target, files, images = sharded.gasp_path(tmp_path, 1), list[bytes](), list[bytes]()
    with Staged(target, sharded.LAYOUT) as staged:
        for rank in range(2):
            as_rank(rank)
            model = _model()
            optimizer = Local(model.parameters())
            shards = sharded.Shards({"model": model}, {"optimizer": optimizer}, rank, 2)
            _grads(model, 1.0 + rank)
            optimizer.step()
            assert shards.look() and not shards.look()
            parts = {entry.path[-1] for entry in shards.found.table.entries if not entry.plain}
            assert parts >= {"momentum"} and not parts & {"calls", "sums"}
            groups = [[{"lr": 0.1}]]
            images.append(b"".join(shards.payload(groups)))
            files.append(sharded.write_live(staged, shards, plain=rank == 0, groups=groups))
        staged.open(f"{target.name}/.metadata").write(sharded.metadata(files))
        folder, _ = staged.sealed()
        for rank in range(2):
            as_rank(rank)
            for image in (None, images[rank]):
                model = _model()
                optimizer = Local(model.parameters())
                if image is None:
                    sharded.load(folder, {"model": model}, {"optimizer": optimizer})
                else:
                    sharded.fill(image, {"model": model}, {"optimizer": optimizer}, rank=rank, world_size=2)
                for p, state in optimizer.state.items():
                    momentum: Tensor = state["momentum"]
                    assert type(momentum) is Tensor and momentum.shape == p._local_tensor.shape  # type: ignore[attr-defined]
                    assert torch.equal(momentum, torch.full_like(momentum, 1.0 + rank))
                    assert state["calls"].tolist() == [1.0]


def test_what_one_rank_writes_and_others_hold_otherwise_is_noted_once(as_rank: Ranks) -> None:
    """Optimizers make their state in the first update: what was alike when training began says nothing."""
    said = list[bytes]()
    for rank in range(2):
        as_rank(rank)
        model = _model()
        optimizer = Local(model.parameters())
        shards = sharded.Shards({"model": model}, {"optimizer": optimizer}, rank, 2)
        assert shards.states_of_one() == {}
        _grads(model, 1.0 + rank)
        optimizer.step()
        shards.look()
        said.append(msgspec.msgpack.encode(({}, shards.states_of_one())))
    notes, tags = list[str](), list[str]()

    def gather(tag: str, own: bytes) -> list[bytes]:
        tags.append(tag)
        return said

    place = SimpleNamespace(replicas=((0, 1),))
    parts = SharedParts(SimpleNamespace(note=notes.append, gather=gather, place=place), shards, kept_equal=False)
    for step in (1, 2):
        parts.updated(step, together=True, describable=True)
    assert tags == ["sharded/alike/1", "sharded/alike/2"] and len(notes) == 1
    assert notes[0].startswith("optimizers hold sums as plain tensors or numbers that differ between ranks")


def test_what_cannot_be_described_any_more_costs_saves_and_not_the_training(as_rank: Ranks) -> None:
    as_rank(0, 1)
    model, notes = _model(1), list[str]()
    optimizer = Local(model.parameters())
    source: Any = object.__new__(ShardedSource)
    source.shards = sharded.Shards({"model": model}, {"optimizer": optimizer}, 0, 1)
    source.arena, source._kept, source._cannot, source._completed = None, {}, "", False
    source._extra_states = ExtraStates({})
    place = SimpleNamespace(replicas=((0,),))
    session = SimpleNamespace(note=notes.append, gather=lambda tag, own: [own], place=place)
    source.life = SimpleNamespace(session=session)
    source._shared = SharedParts(session, source.shards, kept_equal=False)
    first = next(iter(model.parameters()))
    for step in range(1, 5):
        _grads(model, 1.0)
        optimizer.step()
        if step in (2, 3):
            assert first.grad is not None
            optimizer.state[first]["norm"] = first.grad.norm()
        else:
            optimizer.state[first].pop("norm", None)
        source.keep(SimpleNamespace(step=step, groups=[[]]))
        if step in (1, 4):
            assert source.kept(step).step == step
            continue
        with pytest.raises(NotSaveable, match=r"from step 2 on nothing can be saved: .*norm: .* not reduced yet"):
            source.kept(step)
        with pytest.raises(ValueError, match="from step 2"):
            source._payload(step)
    assert len(notes) == 1


# -- state that torch does not make ---------------------------------------------------------------------------------


class Mode(torch.optim.Adam):
    """Refuses an update before `train()`, as schedulefree does."""

    training = False

    def step(self, closure: Any = None) -> Any:
        if not self.training:
            raise RuntimeError("not in train mode")
        return super().step(closure)


class Counts(torch.optim.SGD):
    """A counter beside the states of parameters, as madgrad has it; and state that is made in the third update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.state["k"] = self.state.get("k", 0) + 1  # type: ignore[index, call-overload]
        self.state.setdefault("seen", torch.zeros(1)).add_(1)  # type: ignore[call-overload]
        if self.state["k"] > 2:  # type: ignore[index]
            for p in self.param_groups[0]["params"]:
                late = self.state[p].setdefault("late", {"means": [torch.zeros_like(p), torch.zeros(2)], "n": 0})
                late["means"][0].add_(p)
                late["n"] += 1


def _adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def _frozen(model: Any) -> None:
    model[0].requires_grad_(False)


def _dry_run(model: Any) -> None:
    _grads(model, 7.0)


@pytest.mark.parametrize("image", [False, True], ids=["file", "image"])
@pytest.mark.parametrize(
    ("make", "before"),
    [
        (_adam, _frozen), (_adam, _dry_run), (lambda model: Mode(model.parameters()), None),
        (lambda model: Counts(model.parameters(), momentum=0.9), None),
        (lambda model: Local(model.parameters()), _frozen),
    ],
    ids=["unfrozen", "gradients", "refuses", "counts", "local"],
)  # fmt: skip
def test_state_that_torch_does_not_make_comes_from_the_checkpoint(
    tmp_path: Path, as_rank: Ranks, make: Any, before: Any, image: bool
) -> None:
    as_rank(0, 1)
    model: Any = _model(1)
    optimizer = make(model)
    optimizer.training = True
    shards = sharded.Shards({"model": model}, {"optimizer": optimizer}, 0, 1)
    for step in range(4):
        _grads(model, 1.0 + step)
        optimizer.step()
        shards.look()
    saved = b"".join(shards.payload(_groups(optimizer))), _written(tmp_path, shards, optimizer)
    again: Any = _model(1)
    new = make(again)
    if before is not None:
        before(again)
    gradients = [p.grad for p in again.parameters()]
    if image:
        sharded.fill(saved[0], {"model": again}, {"optimizer": new}, rank=0, world_size=1)
    else:
        sharded.load(saved[1], {"model": again}, {"optimizer": new})
    assert [p.grad for p in again.parameters()] == gradients  # the very same ones
    again.requires_grad_(True)
    new.training = True
    for one, its in ((model, optimizer), (again, new)):
        _grads(one, 9.0)
        its.step()
    assert _plain(optimizer.state_dict()) == _plain(new.state_dict())
    assert _plain(list(model.parameters())) == _plain(list(again.parameters()))


class Views(torch.optim.Optimizer):
    """State of each view of a parameter, by its number."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p].setdefault(0, {}).setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                self.state.setdefault((1, 2), torch.zeros(1)).add_(1)  # type: ignore[call-overload]


def test_state_under_keys_that_are_no_text_is_not_made_under_their_text(tmp_path: Path, as_rank: Ranks) -> None:
    """The optimizer would not find it there, and begin anew: it is refused, unless the optimizer has it."""
    as_rank(0, 1)
    model = _model(1)
    optimizer = Views(model.parameters())
    shards = sharded.Shards({"model": model}, {"optimizer": optimizer}, 0, 1)
    _grads(model, 1.0)
    optimizer.step()
    shards.look()
    saved = _written(tmp_path, shards, optimizer)
    for frozen in (False, True):
        again: Any = _model(1)
        again[0].requires_grad_(not frozen)
        new = Views(again.parameters())
        if not frozen:
            sharded.load(saved, {"model": again}, {"optimizer": new})
            assert _plain(optimizer.state_dict()) == _plain(new.state_dict())
            continue
        with pytest.raises(CheckpointMismatch, match=r"0\.weight\.0\.sum is only in the checkpoint"):
            sharded.load(saved, {"model": again}, {"optimizer": new})


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path, as_rank: Ranks) -> None:
    as_rank(0, 1)
    model: Any = _model(1)
    optimizer = _adam(model)
    shards = sharded.Shards({"model": model}, {"optimizer": optimizer}, 0, 1)
    _grads(model, 1.0)
    optimizer.step()
    shards.look()
    saved, other = _written(tmp_path, shards, optimizer), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointMismatch, match="exp_avg is only in the checkpoint"):
        sharded.load(saved, {"model": model}, {"optimizer": other})


def _groups(optimizer: Any) -> list[list[dict[str, Any]]]:
    return [[{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]]


def _written(folder: Path, shards: sharded.Shards, optimizer: Any) -> Path:
    target = sharded.gasp_path(folder, 1)
    with Staged(target, sharded.LAYOUT) as staged:
        part = sharded.write_live(staged, shards, plain=True, groups=_groups(optimizer))
        staged.open(f"{target.name}/.metadata").write(sharded.metadata([part]))
        staged.publish(Provenance(step=1, kind="gasp", format=sharded.layout.FORMAT, job="tests"))
    return target


def _plain(value: Any) -> Any:
    """Numbers, to be compared: those of tensors with their kind."""
    if isinstance(value, Tensor):
        local = getattr(value, "_local_tensor", value)
        return type(value).__name__, str(value.dtype), local.tolist()
    if isinstance(value, dict):
        return {key: _plain(held) for key, held in value.items()}
    return [_plain(held) for held in value] if isinstance(value, list) else value


def test_sharded_tensors_are_refused_in_extra_and_cost_the_item_when_they_come_later(as_rank: Ranks) -> None:
    """One rank's part would be loaded by all. What all ranks hold completely may be one, too."""
    as_rank(0)
    mesh = init_device_mesh("cpu", (2,))
    part, whole = (distribute_tensor(torch.ones(4), mesh, [how], src_data_rank=None) for how in (Shard(0), Replicate()))
    with pytest.raises(ConfigError, match=r"extra\['ema'\].*DTensor.*belong into a module of model="):
        Extras({"ema": {"shadow": {"weight": part}}}).require()
    ema: dict[str, Any] = {"shadow": {"weight": whole}}
    extras = Extras({"ema": ema})
    extras.require()
    extras.take()
    ema["shadow"] = {"weight": part}
    taken, _ = extras.take()
    assert ["cannot be saved" in note for note in extras.settle(taken)] == [True]
    assert taken["ema"]["shadow"]["weight"].placements == whole.placements
