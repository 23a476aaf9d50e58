"""`TorchState`: what the state of a custom loop consists of, and how it is dumped and loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lastgasp.errors import CheckpointMismatch, ConfigError
from lastgasp.pytorch.as_set import AsSet
from lastgasp.pytorch.buffers import persistent_buffers
from lastgasp.pytorch.deepspeed import layout as engine_layout
from lastgasp.pytorch.deepspeed.engine import engine_of, load_engine, of_engine
from lastgasp.pytorch.deepspeed.engine import unsupported as engine_unsupported
from lastgasp.pytorch.extrastate import ExtraStates, put
from lastgasp.pytorch.flags import Flags
from lastgasp.pytorch.inner_schedules import load_schedules
from lastgasp.pytorch.loop import files
from lastgasp.pytorch.loop.copies import Address, Copies, address
from lastgasp.pytorch.loop.extras import Extras, fill, state_of
from lastgasp.pytorch.loop.parts import (
    Parts,
    ddp_of,
    fabric_scaler,
    inner,
    unwrapped,
    without_containers,
    without_fabric,
)
from lastgasp.pytorch.loop.scaler import scaler_dump, scaler_state
from lastgasp.pytorch.loop.unlike import model_problems, optimizer_problems
from lastgasp.pytorch.own_dtypes import load_parts
from lastgasp.pytorch.owncopy import schedule_of
from lastgasp.pytorch.position import ELASTIC
from lastgasp.pytorch.statedigest import digest, digests_of, leaves
from lastgasp.pytorch.weight_modes import patch_group, which_weights
from lastgasp.pytorch.zero import is_flat, is_zero
from lastgasp.topology import ReplicaGroups, data_parallel

HOOKS = "_optimizer_step_pre_hooks"
"""What torch's optimizers keep their hooks in."""
_PIPELINE = "PipelineModule"


@dataclass(slots=True)
class Snapshot:
    """What is captured at the end of a step: references and shallow copies."""

    step: int
    epoch: int
    schedulers: list[dict[str, Any]]
    groups: list[list[dict[str, Any]]]
    scaler: dict[str, Any] | None
    extra: dict[str, Any]
    flags: tuple[bytes, bytes, bytes]
    modules: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class TorchState:
    """Everything that a training loop carries from step to step.

    Args:
        model: an `nn.Module` (also wrapped by DistributedDataParallel or torch.compile), a list or a dict of them; an
            averaged model (EMA) is one of them.
        optimizer: one, a list or a dict of them.
        scheduler: learning-rate schedulers, one, a list or a dict of them.
        scaler: a `torch.amp.GradScaler`.
        sampler: has `set_epoch`, called at the beginning of each epoch; where it has `state_dict` and
            `load_state_dict`, its state at the beginning of the pass over the data is restored, too.
        extra: name -> a dict (saved as it is at the end of a step, restored in place), or an object with
            `state_dict` and `load_state_dict`. For small things, they are copied in every step. Saved once, by any of
            the ranks, and the same on all of them after a resume: nothing that differs between ranks. If it
            differs nevertheless, the log and the incident say so.
        replicated: says that all ranks hold the same model although it is not wrapped by DistributedDataParallel; of
            a sharded one, that ranks which hold the same parts are kept equal although no mesh joins them.
        elastic: the `ElasticLoader` of the loop. It keeps the ranks equal, and is told the epoch as a sampler is.

    Raises:
        ConfigError: an object without the methods it needs.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        *,
        sampler: Any = None,
        extra: Mapping[str, Any] | None = None,
        replicated: bool = False,
        elastic: Any = None,
    ) -> None:
        scaler = fabric_scaler(model) if scaler is None else scaler
        model, optimizer = without_fabric(model), without_fabric(optimizer)
        self.models = Parts.of("model", model, "named_parameters")
        self.engine = engine_of(self.models.values())
        if self.engine is not None:
            optimizer, scheduler = of_engine(self.engine, optimizer, scheduler)
        optimizer, self.containers = without_containers(inner(optimizer, "optimizer", HOOKS))
        self.optimizers = Parts.of("optimizer", optimizer, "param_groups")
        self.schedulers = Parts.of("scheduler", inner(scheduler, "scheduler", "optimizer"), "load_state_dict")
        self.scaler, self.sampler, self.replicated = scaler, sampler, replicated
        self.extra, self.elastic = dict(extra or {}), elastic
        if elastic is not None:
            self._require_elastic(elastic)
            elastic.known = True
            self.sampler, self.replicated, self.extra[ELASTIC] = elastic, True, elastic.used
        for item in self.optimizers.values():
            if not hasattr(item, HOOKS):
                remedy = ("A class derived from it must call its __init__; of a wrapper give what is inside, and where "
                          "it keeps a state of its own, the wrapper as extra={...}.")  # fmt: skip
                raise ConfigError("optimizer", type(item).__name__, "a torch.optim.Optimizer", remedy)
        if not self.models:
            raise ConfigError("model", model, "at least one nn.Module", "Give the model that is trained.")
        for name, item in self.extra.items():
            if isinstance(item, nn.Module):
                raise ConfigError(f"extra[{name!r}]", type(item).__name__, "something small",
                                  "A module belongs into model={...}, even if it is not trained.")  # fmt: skip
            if not isinstance(item, dict) and not hasattr(item, "load_state_dict"):
                raise ConfigError(f"extra[{name!r}]", type(item).__name__,
                                  "a dict, or an object with state_dict() and load_state_dict()",
                                  "A number is kept in a dict: best = {'acc': 0.0}.")  # fmt: skip
        self.modules = {name: unwrapped(module) for name, module in self.models.items.items()}
        self.container, self._extras = nn.ModuleDict(self.modules), Extras(self.extra)
        self.flags, self.extra_states = Flags(self.container, self.engine is None), ExtraStates(self.container)
        called = [{parts.label(name): one for name, one in parts.items.items()}
                  for parts in (self.optimizers, self.schedulers)]  # fmt: skip
        self.as_set = AsSet(called[0], called[1], "in the body of the loop over batches", self.container)
        self.ddp = next(filter(None, map(ddp_of, self.models.values())), None)
        spread = is_flat(self.container) or any(hasattr(p, "device_mesh") for p in self.container.parameters())
        self.partitioned = any(map(is_zero, self.optimizers.values()))
        self.sharded = spread or self.partitioned or self.engine is not None

    # -- what it is ---------------------------------------------------------------------------------------

    def _require_elastic(self, loader: Any) -> None:
        if not hasattr(loader, "used"):
            raise ConfigError("elastic", type(loader).__name__, "an ElasticLoader", "Other loaders go to s.batches().")
        if self.sampler is not None or ELASTIC in self.extra:
            raise ConfigError("elastic", "with a sampler, or extra['elastic']", "alone",
                              "An ElasticLoader chooses the samples itself.")  # fmt: skip
        summed = {id(p) for p in loader.model.parameters()}
        groups = [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]
        if any(id(p) not in summed for group in groups for p in group["params"]):
            raise ConfigError("elastic", "an optimizer of other parameters than its model's", "one model for all",
                              "Give ElasticLoader the model with all that is trained (nn.ModuleDict).")  # fmt: skip

    def noting(self, note: Callable[[str], None]) -> Callable[[str], None]:
        """What to do with what other ranks than those that have saved cannot resume with: random state, mostly.

        An `ElasticLoader` seeds it in each step.
        """
        return note if self.elastic is None else _ignored

    def require_supported(self, world_size: int) -> None:
        """Refuse what the survivors alone could not save.

        Raises:
            ConfigError: a sharded or an unwrapped model, an optimizer that gathers its state from other ranks, `extra`
                that no file can hold.
        """
        self._extras.require()
        if self.sharded:
            self._require_describable(world_size)
            if not self.partitioned:
                return
        remedy = "Use fully_shard (FSDP2) or DistributedDataParallel, or lastgasp's Lightning or Megatron plugin."
        for module in [*self.models.values(), *self.modules.values()]:
            kinds = {kind.__name__ for m in module.modules() for kind in type(m).__mro__}
            if _PIPELINE in kinds:
                allowed = "a model that each rank holds completely (DDP), or fully_shard"
                raise ConfigError("model", _PIPELINE, allowed, remedy)
        for optimizer in self.optimizers.values():
            if hasattr(optimizer, "consolidate_state_dict") and not is_zero(optimizer):
                allowed = "an optimizer that each rank holds completely"
                raise ConfigError("optimizer", type(optimizer).__name__, allowed, remedy)
        if world_size > 1 and not self.replicated:
            self._require_ddp(world_size)

    def _require_ddp(self, world_size: int) -> None:
        size = 0 if self.ddp is None else dist.get_world_size(self.ddp.process_group)
        if size < world_size:
            kind = type(next(iter(self.models.values()))).__name__
            raise ConfigError("model", f"{kind} over {size} ranks" if size else kind,
                              f"a DistributedDataParallel model over all {world_size} ranks of this job",
                              "Wrap it before the session is opened; or say TorchState(..., replicated=True) if your "
                              "loop itself keeps all ranks equal. Stages of a pipeline cannot be saved.")  # fmt: skip

    def _require_describable(self, world_size: int) -> None:
        if self.engine is not None:
            found = engine_unsupported(self.engine, world_size)
        else:
            from lastgasp.pytorch.sharded import unsupported

            found = unsupported(self.modules, self.optimizers.items)
        if found is not None:
            raise ConfigError("optimizer" if self.partitioned else "model", *found)
        if self.partitioned and self.elastic is not None:
            raise ConfigError("elastic", "with ZeroRedundancyOptimizer", "an optimizer that each rank holds completely",
                              "Fewer ranks would lack the state that the others held.")  # fmt: skip

    def groups(self, world_size: int) -> ReplicaGroups:
        """Which ranks should hold the same. All ranks call it together: a sharded model gathers a few bytes.

        Raises:
            ConfigError: as `require_supported`, and as `sharded.replica_groups`.
        """
        if not self.sharded:
            return data_parallel(world_size)
        self.require_supported(world_size)
        if self.engine is not None or self.partitioned:
            return tuple((rank,) for rank in range(world_size))
        from lastgasp.pytorch.sharded import replica_groups

        return replica_groups(self.modules, world_size, self.replicated)

    @property
    def layout(self) -> Any:
        """The module that names this state's checkpoints: FORMAT, LAYOUT, gasp_path, periodic_path."""
        if not self.sharded:
            return files
        if self.engine is not None:
            return engine_layout
        from lastgasp.pytorch.sharded import layout

        return layout

    def devices(self) -> list[torch.device]:
        """The accelerators that hold the model."""
        found = {p.device for p in self.container.parameters()}
        return sorted((d for d in found if d.type not in ("cpu", "meta")), key=str)

    def per_rank_buffers(self, world_size: int) -> bool:
        """Whether each rank has module buffers of its own, instead of those that rank 0 broadcasts."""
        if world_size == 1 or self.elastic is not None:
            return False
        wrapped = [ddp_of(module) for module in self.models.values()]
        return self.partitioned or not all(w is not None and w.broadcast_buffers for w in wrapped)

    def buffer_bytes(self) -> int:
        """Bytes of the persistent buffers."""
        return sum(
            value.numel() * value.element_size()
            for _, (holder, name) in persistent_buffers(self.container)
            if (value := holder[name]) is not None
        )

    def digests(self) -> dict[str, bytes]:
        """Digests of what all ranks hold in common, by name."""
        models = {self.models.label(name): module for name, module in self.modules.items()}
        return digests_of(models, {self.optimizers.label(n): o for n, o in self.optimizers.items.items()})

    def extra_digest(self) -> bytes:
        """Digests of the current items of `extra`, one after the other."""
        return b"".join(digest(leaves(state_of(item))) for item in self.extra.values())

    # -- at the end of a step -----------------------------------------------------------------------------

    def snapshot(self, step: int, epoch: int, *, whole: bool = True) -> Snapshot:
        """Capture the current auxiliary state. Takes microseconds, but for `whole`: with modules' extra state."""
        extra, notes = self._extras.take()
        return Snapshot(
            step,
            epoch,
            [*map(schedule_of, self.schedulers.values())],
            [[_hyperparameters(g) for g in o.param_groups] for o in self.optimizers.values()],
            scaler_state(self.scaler),
            extra,
            self.flags.take(),
            {} if self.sharded else self.extra_states.take() if whole else self.extra_states.step_over(step),
            notes,
        )

    def settle(self, snapshot: Snapshot) -> None:
        """It goes to a file now: have `extra` hold nothing that no file can, which becomes a note. Idempotent."""
        snapshot.notes.extend(self._extras.settle(snapshot.extra))

    # -- dump ---------------------------------------------------------------------------------------------

    def dump(self, snapshot: Snapshot, tensors: Mapping[str, Tensor], copies: Copies | None) -> dict[str, Any]:
        """The checkpoint of `snapshot`, without the key `lastgasp`. Tensors are the live ones, or the copies.

        Args:
            tensors: key in the container's `state_dict` -> value at the end of the step: buffers, and what moves.
            copies: parameters and optimizer states at the end of the step, if an update has begun since.
        """
        places = self._places(tensors, copies)
        models = [_replaced(m.state_dict(), places) for m in self.modules.values()]
        for name, model in zip(self.modules, models, strict=True):
            put(model, snapshot.modules, f"{name}.")
            put(model, tensors, f"{name}.")
        live = copies.optimizers() if copies is not None else [o.state_dict() for o in self.optimizers.values()]
        for state, groups in zip(live, snapshot.groups, strict=True):
            for group, values in zip(state["param_groups"], groups, strict=True):
                patch_group(group, values)
        return self.dump_small(snapshot) | {
            "model": self.models.pack(models),
            "optimizer": self.optimizers.pack(live),
        }

    def which_weights(self) -> list[Any]:
        """Of all optimizers, which of their weights are in the models (`weight_modes`)."""
        return which_weights(one.param_groups for one in self.optimizers.values())

    def dump_small(self, snapshot: Snapshot) -> dict[str, Any]:
        """The same without models and optimizers."""
        return {
            "step": snapshot.step,
            "epoch": snapshot.epoch,
            "scheduler": self.schedulers.pack(snapshot.schedulers),
            "scaler": scaler_dump(self.scaler, snapshot.scaler),
            "extra": snapshot.extra,
            "flags": self.flags.record(snapshot.flags),
        }

    def _places(self, tensors: Mapping[str, Tensor], copies: Copies | None) -> dict[Address, Tensor]:
        """Key of a live tensor -> what is saved instead."""
        found = dict(copies.parameters()) if copies is not None else {}
        kinds: tuple[Any, ...] = (self.container.named_buffers, self.container.named_parameters)
        for name, live in (row for named in kinds for row in named(remove_duplicate=False)):
            if name in tensors and live.numel():
                found[address(live)] = tensors[name]
        return found

    def begins(self, before: Snapshot | None) -> None:
        """A step's first forward pass: what gradients it finds belong to the state at the end of the step `before`."""
        graded = self.flags.look()
        if before is not None:
            before.flags = *before.flags[:2], graded

    # -- load ---------------------------------------------------------------------------------------------

    def load(self, checkpoint: Mapping[str, Any], path: str, shards: Callable[[], None] | None = None) -> None:
        """Restore everything from a checkpoint; nothing is changed before all of it has been compared.

        Args:
            shards: fills those of a sharded model; by default from `path`.

        Raises:
            CheckpointMismatch: it is of another model, optimizer, ...; lists every difference.
        """
        stored = {role.role: role.unpack(checkpoint.get(role.role)) for role in self._roles()}
        problems = self._problems(checkpoint, stored)
        if problems:
            raise CheckpointMismatch(path, problems)
        if self.sharded:
            (shards or partial(self._load_shards, Path(path), checkpoint))()
        else:
            load_parts(self.modules, stored["model"] or {}, self.optimizers.items, stored["optimizer"] or {})
        self._fill_aux(stored["scheduler"] or {}, checkpoint["scaler"], copy.deepcopy(checkpoint["extra"]))
        self.flags.restore(checkpoint.get("flags"))

    def _load_shards(self, path: Path, checkpoint: Mapping[str, Any]) -> None:
        if self.engine is not None:
            load_engine(self.engine, path, checkpoint)
            return
        from lastgasp.pytorch import sharded

        single: dict[str, Any] = {"single_model": self.models.single, "single_optimizer": self.optimizers.single}
        sharded.load(path, self.modules, self.optimizers.items, **single)

    def remember(self, checkpoint: Mapping[str, Any]) -> Callable[[], None]:
        """After `load`: a function that restores everything except parameters and optimizer states once more.

        On the way to its position a resumed loop repeats what happens between two passes over data.
        """
        kept = {name: value.detach().clone() for name, value in self.container.named_buffers()}
        modules = self.extra_states.take()
        stored = {role.role: role.unpack(checkpoint.get(role.role)) or {} for role in self._roles()}
        aux = copy.deepcopy((stored["scheduler"], checkpoint["scaler"], checkpoint["extra"]))
        flags = checkpoint.get("flags")
        groups = [[_hyperparameters(g) for g in o.param_groups] for o in self.optimizers.values()]

        def again() -> None:
            for name, value in self.container.named_buffers():
                if name in kept and kept[name].shape == value.shape:  # else made since then, by the user's own code
                    value.detach().copy_(kept[name])
            self.extra_states.restore(modules)
            for optimizer, saved in zip(self.optimizers.values(), groups, strict=True):
                for group, values in zip(optimizer.param_groups, saved, strict=True):
                    patch_group(group, values)
            self._fill_aux(*aux)
            self.flags.restore(flags, tell=False)

        return again

    def _fill_aux(self, schedulers: Mapping[str, Any], scaler: Any, extra: Mapping[str, Any]) -> None:
        load_schedules((item, schedulers[name]) for name, item in self.schedulers.items.items())
        if self.scaler is not None and scaler:
            self.scaler.load_state_dict(scaler)
        for name, item in self.extra.items():
            fill(item, extra[name])

    def _roles(self) -> tuple[Parts, ...]:
        return (self.schedulers,) if self.sharded else (self.models, self.optimizers, self.schedulers)

    def _problems(self, checkpoint: Mapping[str, Any], stored: Mapping[str, dict[str, Any] | None]) -> list[str]:
        problems = [
            f"{role.role}: the checkpoint has {_names(checkpoint.get(role.role))}, this loop has {len(role.items)}"
            for role in self._roles()
            if (role or checkpoint.get(role.role) is not None) and stored[role.role] is None
        ]
        if (self.scaler is None) != (checkpoint.get("scaler") is None):
            problems.append("scaler: only one of the checkpoint and this loop has one")
        missing = sorted(set(self.extra) ^ set(checkpoint.get("extra", {})))
        problems += [f"extra[{name!r}]: only one of the checkpoint and this loop has it" for name in missing]
        for name, module in self.modules.items():
            if own := stored.get("model"):
                problems += model_problems(name, module, own[name])
        for name, optimizer in self.optimizers.items.items():
            if own := stored.get("optimizer"):
                problems += optimizer_problems(name, optimizer, own[name])
        return problems


def _ignored(text: str) -> None:
    """It does not matter."""


def _names(stored: Any) -> str:
    if stored is None:
        return "none"
    named = isinstance(stored, dict) and all(isinstance(v, dict) for v in stored.values())
    return f"{sorted(stored)}" if named and stored else "one"


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    copied = group.copy()
    del copied["params"]
    lr = copied.get("lr")
    if isinstance(lr, Tensor):  # schedulers fill a tensor learning rate in place
        copied["lr"] = lr.clone()
    return copied


def _replaced(state: dict[str, Any], places: Mapping[Address, Tensor]) -> dict[str, Any]:
    for name, value in state.items():
        if isinstance(value, Tensor) and not is_lazy(value) and value.numel():
            state[name] = places.get(address(value), value)
    return state
