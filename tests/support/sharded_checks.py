"""Four ranks check lastgasp.pytorch.sharded on real FSDP2 and FSDP1 models: `sharded_checks.py FOLDER`.

Rank 0 prints one line per check: its name, and `ok` or what was wrong on the first rank where something was.
"""

from __future__ import annotations

import copy
import faulthandler
import gc
import os
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from lastgasp.checkpoint import Provenance, Staged, verify
from lastgasp.checkpoint.part import SavedPart, part_of
from lastgasp.errors import CheckpointError, CheckpointMismatch, ConfigError
from lastgasp.pytorch import sharded
from lastgasp.pytorch.sharded_alike import SharedParts
from support.sharded_models import Built, Counting, Net, built, spread, train

STEPS = 3


def shards_of(made: Built) -> sharded.Shards:
    """As a session makes it."""
    return sharded.Shards(*made, dist.get_rank(), dist.get_world_size(), **singles(made))


def singles(made: Built) -> dict[str, Any]:
    """The arguments that say whether there are names."""
    return {"single_model": len(made[0]) == 1, "single_optimizer": len(made[1]) == 1}


def groups_of(made: Built) -> list[list[dict[str, Any]]]:
    """As a session's snapshot has them."""
    return [
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for optimizer in made[1].values()
    ]


def image_of(shards: sharded.Shards, groups: Any) -> bytes:
    """The bytes of an arena."""
    shards.look()
    whole = b"".join(shards.payload(groups))
    assert len(whole) == shards.payload_size
    return whole


def snapshot(made: Built) -> dict[str, Any]:
    """Name -> everything of this rank, copied: tensors as bits."""
    found: dict[str, Any] = {}
    for name, model in made[0].items():
        for key, value in model.state_dict().items():
            found[f"{name} {key}"] = _copy(value)
    for name, optimizer in made[1].items():
        state = optimizer.state_dict()
        for number, one in state["state"].items():
            found[f"{name} {number}"] = _copy(one)
        found[f"{name} groups"] = _copy(state["param_groups"])
    return found


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        local = value._local_tensor if isinstance(value, DTensor) else value
        bits = bytes(local.detach().contiguous().view(-1).view(torch.uint8).numpy())
        return str(local.dtype), tuple(local.shape), bits
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copy(item) for item in value)
    return copy.deepcopy(value)


def require_same(found: dict[str, Any], wanted: dict[str, Any], own: bool = False) -> None:
    """Bit by bit. Statistics of a BatchNorm are each rank's own, and a directory has those of one (`own`: not here)."""
    assert set(found) == set(wanted), set(found) ^ set(wanted)
    names = [name for name in wanted if own or "running_" not in name]
    differing = [name for name in names if found[name] != wanted[name]]
    assert not differing, (differing, [(found[n], wanted[n]) for n in differing[:1]])


def save(folder: Path, made: Built, dead: set[int], images: list[bytes]) -> Path:
    """A gasp in which rank 0 writes the files of the dead from their images. Returns its path on all ranks."""
    rank, target = dist.get_rank(), sharded.gasp_path(folder, STEPS)
    shards, groups = shards_of(made), groups_of(made)
    staged, parts, described = None, {}, list[bytes]()
    if rank not in dead:
        staged = Staged(target, sharded.LAYOUT)
        described.append(sharded.write_live(staged, shards, plain=rank == min({*range(4)} - dead), groups=groups))
        if rank == min({*range(4)} - dead):
            described += [sharded.write_arena(staged, images[one], plain=False) for one in sorted(dead)]
        parts = {rank: part_of(staged)}
    gathered: list[Any] = [None] * 4
    dist.all_gather_object(gathered, (parts, described))
    first = min({*range(4)} - dead)
    if rank == first:
        assert staged is not None
        whole = sharded.metadata([one for _, some in gathered for one in some])
        staged.open(f"{target.name}/.metadata").write(whole)
        saved = SavedPart(step=STEPS, staged=staged, nbytes=staged.nbytes, part=parts[rank])
        about = Provenance(step=STEPS, kind="gasp", format=sharded.layout.FORMAT, job="tests")
        saved.publish({k: v for some, _ in gathered for k, v in some.items()}, about)
        assert verify(target, sharded.LAYOUT).ok
    dist.barrier()
    return target


# -- the checks ---------------------------------------------------------------------------------------------------


def everything(name: str, folder: Path) -> None:
    """Save from live ranks and from images; load by plain torch, by lastgasp, and from the image: bit-equal."""
    made = built(name)
    fresh_table = shards_of(made).table()
    shards = shards_of(made)
    train(made, 0, STEPS)
    assert shards.look() and shards.table() != fresh_table and not shards.look()
    image = image_of(shards, groups_of(made))
    wanted, images = snapshot(made), [b""] * 4
    dist.all_gather_object(images, image)
    target = save(folder / name, made, {2}, images)
    train(made, STEPS, STEPS + 2)
    ahead = snapshot(made)

    again = built(name, seed=2)
    sharded.load(target, *again, **singles(again))
    require_same(snapshot(again), wanted)
    train(again, STEPS, STEPS + 2)
    require_same(snapshot(again), ahead)

    memory = built(name, seed=3)
    sharded.fill(image, *memory, rank=dist.get_rank(), world_size=4, **singles(memory))
    require_same(snapshot(memory), wanted, own=True)
    train(memory, STEPS, STEPS + 2)
    require_same(snapshot(memory), ahead, own=True)

    if len(made[0]) == 1 and name != "flat_hybrid":  # torch's own function takes all ranks for those of one replica
        plainly(built(name, seed=4), target, wanted, ahead)


def plainly(made: Built, target: Path, wanted: dict[str, Any], ahead: dict[str, Any]) -> None:
    """By torch alone, as its tutorial does it."""
    model, optimizer = made[0]["model"], made[1]["optimizer"]
    if isinstance(model, FullyShardedDataParallel):
        flatly(model, optimizer, target)
        require_same(snapshot(made), wanted)
        train(made, STEPS, STEPS + 2)
        require_same(snapshot(made), ahead)
        return
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    unused = [n for n in state["optimizer"]["state"] if n.startswith("unused")]
    for one in unused:  # torch makes state for these, and finds none
        del state["optimizer"]["state"][one]
    dcp.state_dict_loader.load(state, checkpoint_id=str(target))
    parameters = dict(model.named_parameters())
    for one in unused:
        optimizer.state.pop(parameters[one])
        parameters[one].requires_grad_(False)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for one in unused:
        parameters[one].requires_grad_(True)
    require_same(snapshot(made), wanted)
    train(made, STEPS, STEPS + 2)
    require_same(snapshot(made), ahead)


def flatly(model: Any, optimizer: Any, target: Path) -> None:
    """By torch alone, as Lightning's `FSDPStrategy` does it."""
    configs = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *configs):
        state = {"model": model.state_dict()}
        dcp.state_dict_loader.load(state, checkpoint_id=str(target))
        model.load_state_dict(state["model"])
        reader = dcp.filesystem.FileSystemReader(target)
        found: Any = load_sharded_optimizer_state_dict(state["model"], "optimizer", reader)
        optimizer.load_state_dict(
            FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, found["optimizer"])
        )


def one_dimensions(folder: Path) -> None:
    everything("one_dimension", folder)


def hybrids(folder: Path) -> None:
    everything("hybrid", folder)


def halves(folder: Path) -> None:
    everything("half", folder)


def tensor_parallels(folder: Path) -> None:
    everything("tensor_parallel", folder)


def severals(folder: Path) -> None:
    everything("several", folder)


def flats(folder: Path) -> None:
    for name in ("flat", "flat_own", "flat_hybrid", "flat_whole"):
        everything(name, folder)


def odd_flats(folder: Path) -> None:
    """Buffers that FSDP1 casts; state that an optimizer makes late, also of parameters of one element; other orders."""
    for own in (False, True):
        made = odd_flat(own)
        for step in range(2):
            made[0]["model"](torch.ones(4, 1) + step).float().sum().backward()
            made[1]["optimizer"].step()
            made[1]["optimizer"].zero_grad()
        wanted, images = snapshot(made), [b""] * 4
        target, image = save(folder / f"odd{own}", made, set(), images), image_of(shards_of(made), groups_of(made))
        again, memory, other = odd_flat(own), odd_flat(own), odd_flat(not own)
        sharded.load(target, *again)
        require_same(snapshot(again), wanted)
        sharded.fill(image, *memory, rank=dist.get_rank(), world_size=4)
        require_same(snapshot(memory), wanted)
        sharded.load(target, *other)
        for kind in (again, memory, other):
            kind[0]["model"](torch.ones(4, 1)).float().sum().backward()
            kind[1]["optimizer"].step()


class Late(Counting):
    """Refuses an update without a learning rate, so that nothing can be made before a checkpoint is loaded."""

    def step(self, closure: Any = None) -> Any:
        """The update."""
        if not self.param_groups[0]["lr"]:
            raise RuntimeError("no learning rate")
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                    p.data.add_(self.state[p]["sum"], alpha=-group["lr"])


def odd_flat(own: bool) -> Built:
    """FSDP1 with one-element parameters and buffers in bfloat16."""
    policy = MixedPrecision(torch.bfloat16, torch.float32, buffer_dtype=torch.bfloat16, cast_forward_inputs=True)
    torch.manual_seed(3)
    options: Any = {"device_id": torch.device("cpu"), "use_orig_params": own, "mixed_precision": policy}
    first = FullyShardedDataParallel(nn.Linear(1, 3), **options)
    norm = nn.BatchNorm1d(3, dtype=torch.float32)
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(1, 1), first, norm), **options)
    return {"model": model}, {"optimizer": Late([{"params": list(model.parameters())}])}


def replicas(folder: Path) -> None:
    """Who is alone, and who has a replica."""
    for name, groups in (
        ("one_dimension", ((0,), (1,), (2,), (3,))),
        ("hybrid", ((0, 2), (1, 3))),
        ("tensor_parallel", ((0,), (1,), (2,), (3,))),
        ("flat", ((0,), (1,), (2,), (3,))),
        ("flat_hybrid", ((0, 2), (1, 3))),
    ):
        models, optimizers = made = built(name)
        assert sharded.unsupported(models, optimizers) is None
        assert sharded.is_sharded(models)
        assert sharded.replica_groups(models, 4) == groups, sharded.replica_groups(models, 4)
        train(made, 0, 1)
        shards = shards_of(made)
        keys: list[Any] = [None] * 4
        dist.all_gather_object(keys, shards.digests())
        for one in range(4):
            alike = {other for other in range(4) if keys[one] == keys[other]}
            assert alike == next(set(group) for group in groups if one in group)
    assert sharded.replica_groups({"model": Net()}, 4) == ((0, 1, 2, 3),)
    apart()
    assert not sharded.is_sharded({"model": Net()})


def apart() -> None:
    """Two stages of a pipeline, each sharded over two ranks: neither names nor places show that they are two."""
    stage = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    model = Net()
    fully_shard(model, mesh=stage["dp"])
    with pytest.raises(ConfigError, match="ranks 0 and 2 hold parts of the same names on meshes that nothing joins"):
        sharded.replica_groups({"model": model}, 4)
    assert sharded.replica_groups({"model": model}, 4, replicated=True) == ((0, 2), (1, 3))
    own = nn.ModuleDict({f"stage {stage['pp'].get_local_rank()}": model})
    with pytest.raises(ConfigError, match="ranks 0 and 2 hold different parameters"):
        sharded.replica_groups({"model": own}, 4)
    few: Any = nn.Linear(1, 2)
    fully_shard(few)
    assert sharded.replica_groups({"model": few}, 4) == ((0,), (1,), (2, 3))  # of which two hold nothing


class AllRanks:
    """What `SharedParts` asks of a session."""

    def __init__(self, replicas: Any = ((0,), (1,), (2,), (3,))) -> None:
        self.place, self.notes = SimpleNamespace(replicas=replicas), list[str]()
        self.note = self.notes.append

    def gather(self, tag: str, payload: bytes) -> list[bytes]:
        """From all ranks."""
        found: list[Any] = [None] * 4
        dist.all_gather_object(found, (tag, payload))
        assert len({tag for tag, _ in found}) == 1
        return [one for _, one in found]


def experts(folder: Path) -> None:
    """Parts of one name on meshes that nothing joins: equal where tensor parallelism does not split, else experts."""
    for kept_equal in (False, True):
        session = AllRanks()
        made = experts_of(dist.get_rank() // 2)
        parts = SharedParts(session, shards_of(made), kept_equal)
        refused = pytest.raises(ConfigError, match=r"0.weight, 0.bias: ranks hold different values of the same part")
        with nullcontext() if kept_equal else refused:
            parts.loaded(differed_before=False)
        parts = SharedParts(session, shards_of(made), kept_equal)
        parts.loaded(differed_before=True)
        assert parts.alike == kept_equal and len(session.notes) == 1 + kept_equal, session.notes
        session, made = AllRanks(), experts_of(0)
        parts = SharedParts(session, shards_of(made), kept_equal)
        parts.loaded(differed_before=False)
        for step in range(1, 5):
            if step > 1:  # a rate that begins with 0, and an expert that gets nothing for a while
                made[0]["model"](torch.full((2, 4), 1.0 + dist.get_rank())).sum().backward()
                made[1]["optimizer"].step()
            parts.updated(step, together=True, describable=True)
            assert parts.alike == (kept_equal or step == 1), step
        [note] = session.notes
        assert note.startswith("ranks hold different values of the same part of 0.weight, 0.bias, "), note
    for name in ("tensor_parallel", "hybrid", "one_dimension", "flat", "flat_whole"):
        made, session = built(name), AllRanks()
        shards = shards_of(made)
        parts = SharedParts(session, shards, kept_equal=False)
        parts.loaded(differed_before=False)
        for step in range(1, 5):
            train(made, step - 1, step)
            shards.look()
            parts.updated(step, together=True, describable=True)
        assert parts.alike and not session.notes, (name, session.notes)
    for replicas in (((0, 2), (1, 3)), ((0,), (1,), (2,), (3,))):
        made, session = built("hybrid", seed=1 + dist.get_rank() // 2), AllRanks(replicas)
        parts = SharedParts(session, shards_of(made), kept_equal=False)
        parts.loaded(differed_before=False)
        said = [note for note in session.notes if note.startswith("ranks should hold the same part of the model (")]
        assert parts.alike and len(said) == (len(replicas) == 4), session.notes  # else they compare all they hold


def experts_of(number: int) -> Built:
    """A layer for each two ranks, and one for all of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("experts", "data"))
    torch.manual_seed(number)
    layer = nn.Linear(4, 4)
    torch.manual_seed(9)
    model = nn.Sequential(layer, nn.Linear(4, 4))
    fully_shard(model[0], mesh=mesh["data"])
    fully_shard(model)
    return {"model": model}, {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)}


def alone(folder: Path) -> None:
    """One rank that does not shard loads what four have saved: each part is where it belongs, with uneven ones too."""
    for name in ("hybrid", "tensor_parallel"):
        made = built(name)
        train(made, 0, 1)
        require_whole(save(folder / f"alone-{name}", made, set(), []), whole_of(made))


def whole_of(made: Built) -> dict[str, Tensor]:
    """The whole model by torch's own means, a collective."""
    stated = made[0]["model"].state_dict()
    stated = {key.replace("_fsdp_wrapped_module.", ""): value for key, value in stated.items()}
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in stated.items()}


def require_whole(target: Path, whole: dict[str, Tensor]) -> None:
    """The checkpoint has these values."""
    model = Net()
    sharded.load(target, {"model": model}, {})
    names = {key.replace("_checkpoint_wrapped_module.", ""): value for key, value in whole.items()}
    for key, value in model.state_dict().items():
        assert "running_" in key or torch.equal(value, names[key]), key


def other_world(folder: Path) -> None:
    """What four ranks have saved is loaded by two, and by one that does not shard."""
    for name in ("flat_own", "one_dimension"):  # of `flat` the groups are others
        made = built(name)
        train(made, 0, STEPS)
        target, whole = save(folder / f"world-{name}", made, set(), []), whole_of(made)
        require_whole(target, whole)
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    model = spread(Net(), mesh=meshes[dist.get_rank() // 2])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    groups = optimizer.param_groups
    params = groups[0]["params"]
    optimizer.param_groups = [{**groups[0], "params": params[:3]}, {**groups[0], "params": params[3:]}]
    sharded.load(target, {"model": model}, {"optimizer": optimizer})
    fewer_flat(target, whole)
    for key, value in model.state_dict().items():
        mine = value.full_tensor() if isinstance(value, DTensor) else value
        assert "running_" in key or torch.equal(mine, whole[key]), key
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0, 0.01]


def fewer_flat(target: Path, whole: dict[str, Tensor]) -> None:
    """The same by two ranks of FSDP1, with the optimizer's state."""
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    flat: Any = FullyShardedDataParallel
    model = flat(Net(), device_id=torch.device("cpu"), process_group=group, use_orig_params=True)
    one: Any = Net()
    optimizer, its = (trained_by(each) for each in (model, one))
    sharded.load(target, {"model": model}, {"optimizer": optimizer})
    sharded.load(target, {"model": one}, {"optimizer": its})
    for key, value in whole_of(({"model": model}, {})).items():
        assert "running_" in key or torch.equal(value, whole[key]), key
    for mine, there in zip(model.parameters(), one.parameters(), strict=True):
        parts: list[Any] = [None, None]
        dist.all_gather_object(parts, optimizer.state.get(mine, {}).get("exp_avg", torch.empty(0)), group)
        assert torch.equal(torch.cat(parts), its.state.get(there, {}).get("exp_avg", torch.empty(0)).flatten())
    assert any(state["exp_avg"].any() for state in its.state.values())


def trained_by(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with the groups of `one_dimension`."""
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW([{"params": params[:3]}, {"params": params[3:]}])


def misfits(folder: Path) -> None:
    """What does not fit is refused, and nothing was changed."""
    made = built("one_dimension")
    train(made, 0, 1)
    target, shards = save(folder / "misfit", made, set(), []), shards_of(made)
    image = image_of(shards, groups_of(made))
    other = spread(Net(16))
    before = snapshot(({"model": other}, {}))
    new: Any = torch.optim.AdamW(made[0]["model"].parameters())
    for attempt in (
        lambda: sharded.load(target, {"model": other}, {}),
        lambda: sharded.fill(image, {"model": other}, {}, rank=dist.get_rank(), world_size=4),
        lambda: sharded.fill(image, *made, rank=dist.get_rank(), world_size=5),
        lambda: sharded.load(target, made[0], {"optimizer": new}),
    ):
        with pytest.raises(CheckpointMismatch):
            attempt()  # type: ignore[no-untyped-call]
    require_same(snapshot(({"model": other}, {})), before)
    for damaged in (image[:-1], b"\0" + image[1:], image[:100] + b"\xff" * 40 + image[140:], b""):
        with pytest.raises(ValueError):
            sharded.parse(damaged)


def holes(folder: Path) -> None:
    """A checkpoint that lacks a shard, or what all ranks hold alike, is never made."""
    made = built("one_dimension")
    train(made, 0, 1)
    shards, groups, rank = shards_of(made), groups_of(made), dist.get_rank()
    described: list[Any] = [None] * 4
    with Staged(sharded.gasp_path(folder / "holes", 1), sharded.LAYOUT) as staged:
        own = sharded.write_live(staged, shards, plain=rank == 0, groups=groups)
    dist.all_gather_object(described, own)
    sharded.metadata(described)
    for some in (described[:2] + described[3:], described[1:]):
        with pytest.raises(CheckpointError):
            sharded.metadata(some)


def moved(folder: Path) -> None:
    """Tensors that get other memory, and state that comes later, are followed."""
    made = built("half")
    shards, optimizer = shards_of(made), made[1]["optimizer"]
    train(made, 0, 2)
    shards.look()
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].clone()
    assert not shards.look()
    train(made, 2, 3)
    require_image(shards, made)
    model: Any = made[0]["model"]
    model.unused.weight.grad = torch.zeros_like(model.unused.weight)  # its state is made in step 4
    train(made, 3, 4)
    assert shards.look()
    require_image(shards, made)
    before = image_of(shards, None)
    model(torch.zeros(8, dtype=torch.int64))  # parameters of the root stay gathered
    assert type(model.few.weight) is nn.Parameter
    after, entries = image_of(shards, None), sharded.parse(before).table.entries
    changed = [entry.name for entry in entries if _raw(before, entry) != _raw(after, entry)]
    assert all("norm." in name for name in changed), changed
    moved_flat()


def moved_flat() -> None:
    """FSDP1 takes a parameter's new memory over in the next forward pass; what is gathered is not looked at."""
    made = built("flat_own")
    shards, model = shards_of(made), made[0]["model"]
    train(made, 0, 2)
    before = image_of(shards, None)
    loss = model(torch.zeros(8, dtype=torch.int64)).sum()  # gathered until the backward pass
    after = b"".join(shards.payload(None))
    changed = [e.name for e in sharded.parse(before).table.entries if _raw(before, e) != _raw(after, e)]
    assert all("norm." in name for name in changed), changed
    loss.backward()
    for parameter in model.parameters():
        parameter.data, parameter.grad = parameter.data.clone(), None
    with pytest.raises(ConfigError, match="a parameter of FSDP1 that was given other memory"):
        shards.look()
    target: Any = FullyShardedDataParallel(nn.Linear(2, 3), device_id=torch.device("cpu"))  # without a forward pass
    other = sharded.Shards({"model": target}, {}, dist.get_rank(), 4)
    for parameter in target.parameters():
        parameter.data = parameter.data + 1
    other.look()
    found = sharded.parse(b"".join(other.payload(None)))
    whole = torch.cat([found.tensor(e).flatten() for e in found.table.entries])
    assert torch.equal(whole, next(target.parameters()).detach()[: len(whole)])
    train(made, 2, 3)
    shards.look()
    held = sharded.parse(image_of(shards, None))
    for entry, live in shards.tensors():
        assert torch.equal(held.tensor(entry), live), entry.name


def _raw(image: bytes, entry: sharded.Entry) -> bytes:
    return bytes(sharded.parse(image).raw(entry))


def require_image(shards: sharded.Shards, made: Built) -> None:
    """The image holds what the optimizers hold."""
    found = sharded.parse(image_of(shards, groups_of(made)))
    held = {e.name: found.tensor(e) for e in found.table.entries}
    for entry, live in shards.tensors():
        assert torch.equal(held[entry.name], live), entry.name
    model, optimizer = made[0]["model"], made[1]["optimizer"]
    stated: Any = get_optimizer_state_dict(model, optimizer)["state"]
    for fqn, state in stated.items():
        for key, value in state.items():
            local = value._local_tensor if isinstance(value, DTensor) else value
            assert torch.equal(held[f"optimizer.state.{fqn}.{key}"], local), (fqn, key)


def refusals(folder: Path) -> None:
    """What cannot be described says so."""
    torch.manual_seed(1)
    model: Any = Net()
    stale = torch.optim.AdamW(model.parameters())
    fully_shard(model)
    with pytest.raises(ConfigError, match="before the model was sharded"):
        sharded.Shards({"model": model}, {"optimizer": stale}, dist.get_rank(), 4)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    old = Net()
    old.few.weight = nn.Parameter(old.back.weight.detach().t())
    flat: Any = FullyShardedDataParallel
    first = sharded.unsupported({"model": flat(old, device_id=torch.device("cpu"), use_orig_params=True)}, {})
    assert first is not None and "not contiguous" in first[0]
    apart = Net()
    alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    apart.few = flat(apart.few, device_id=torch.device("cpu"), process_group=alone)
    experts = sharded.unsupported({"model": flat(apart, device_id=torch.device("cpu"), use_orig_params=True)}, {})
    assert experts is not None and "different process groups" in experts[0]
    make: Any = ZeroRedundancyOptimizer
    zero = make(Net().parameters(), torch.optim.AdamW)
    assert sharded.unsupported({"model": Net()}, {"optimizer": zero}) is None
    second = sharded.unsupported({"model": model}, {"optimizer": zero})
    assert second is not None and second[0] == "ZeroRedundancyOptimizer" and "with fully_shard" in second[2]


CHECKS = (
    one_dimensions, hybrids, halves, tensor_parallels, severals, flats, odd_flats, replicas, experts, alone,
    other_world, misfits, holes, moved, refusals,
)  # fmt: skip


def main() -> None:
    """Each check on all ranks; one that fails does not hinder the next."""
    faulthandler.dump_traceback_later(float(os.environ.get("PATIENCE", 450)), exit=True)
    dist.init_process_group("gloo")
    only = sys.argv[2:]
    for check in CHECKS:
        if only and check.__name__ not in only:
            continue
        try:
            check(Path(sys.argv[1]))
            result = ""
        except BaseException:
            result = traceback.format_exc()
            print(f"rank {dist.get_rank()}: {result}", file=sys.stderr, flush=True)
        results: list[Any] = [None] * 4
        dist.all_gather_object(results, result)
        if dist.get_rank() == 0:
            bad = next((f"rank {rank}: {text}" for rank, text in enumerate(results) if text), "ok")
            print(f"{check.__name__}: {bad}", flush=True)
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
