"""The content of `model_optim_rng.pt`, built as Megatron's `generate_state_dict` builds it, from local state only."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lastgasp.adapter import NotSaveable
from lastgasp.adapter.torch import extrastate
from lastgasp_megatron.aux_state import native
from lastgasp_megatron.merge import Weight
from lastgasp_megatron.steps import Boundary, Built, is_stub, parts_of
from lastgasp_megatron.topology import Shard

log = logging.getLogger("lastgasp")


class Composer:
    """Builds the state of one rank's part of the model.

    Args:
        built: Megatron's; shard: what this rank holds.
    """

    def __init__(self, built: Built, shard: Shard) -> None:
        self._args, self._model, self.optimizer, _ = built
        self.shard = shard

    def compose(self, boundary: Boundary, weights: Mapping[int, Weight]) -> dict[str, Any]:
        """The complete content but random states, with `weights` in place of parameters whose live values may be of
        another step.

        Args:
            boundary: the step; weights: by the id of a parameter.

        Raises:
            NotSaveable: a model changed by ModelOpt, in a job that saves in torch_dist.
        """
        state: dict[str, Any] = {"args": self._arguments(boundary), "checkpoint_version": 3.0}
        state["iteration"] = boundary.step
        known: dict[int, Any] = {**boundary.kept.by_id(), **weights}
        for index, chunk in enumerate(self._model):
            name = "model" if len(self._model) == 1 else f"model{index}"
            state[name] = found = _weights(chunk.state_dict_for_save_checkpoint(keep_vars=True), known)
            extrastate.put(found, boundary.kept.extra.get(index, {}))
        if not is_stub(self.optimizer):
            state["optimizer"] = self._optimizer_state(boundary)
        if boundary.scheduler is not None:
            state["opt_param_scheduler"] = boundary.scheduler
        state["num_floating_point_operations_so_far"] = self._operations(boundary.trained)
        self._add_modelopt_state(state)
        return state

    def _add_modelopt_state(self, state: dict[str, Any]) -> None:
        """How ModelOpt has changed the model (quantized, pruned), which a restart has to do again before it loads."""
        megatron = sys.modules.get("megatron.training.checkpointing")
        if not getattr(megatron, "has_nvidia_modelopt", False):
            return
        known, functions = set(state), vars(megatron)
        functions["save_modelopt_state"](functions["unwrap_model"](self._model), state)
        if set(state) - known and getattr(self._args, "ckpt_format", "torch") == "torch_dist":
            raise NotSaveable("ModelOpt has changed this model, and with --ckpt-format torch_dist Megatron does not "
                              "look for that in what survivors can save: give --ckpt-format torch")  # fmt: skip

    def _arguments(self, boundary: Boundary) -> Any:
        args = copy.copy(self._args)
        args.consumed_train_samples, args.skipped_train_samples = boundary.consumed, boundary.skipped
        if hasattr(args, "consumed_valid_samples"):
            args.consumed_valid_samples = boundary.validated
        if hasattr(args, "curr_iteration"):
            args.curr_iteration = boundary.step - 1  # at a save of Megatron's: counted before the iteration
        return args

    def _optimizer_state(self, boundary: Boundary) -> Any:
        optimizer, parts = self.optimizer, parts_of(self.optimizer)
        if is_distributed(optimizer) and not any(one.optimizer.state for one in parts):
            states = [_before_any_update(one) for one in parts]
            found: Any = states if len(states) > 1 else states[0]
        else:
            found = optimizer.state_dict()
            chain = getattr(optimizer, "chained_optimizers", [optimizer])
            pairs = zip(chain, found if isinstance(found, list) else [found], strict=True)
            states = [state for one, state in pairs if not is_stub(one)]
        for state, scaler in zip(states, boundary.scalers, strict=True):
            if scaler is not None:
                state["grad_scaler"] = scaler
        return found

    def _operations(self, samples: int) -> float:
        """What Megatron counts for its log, of what this start has trained with; it keeps it in a local variable."""
        before = float(getattr(self._args, "num_floating_point_operations_so_far", 0) or 0)
        try:
            from megatron.training.training import num_floating_point_operations

            count: Callable[..., Any] = num_floating_point_operations
            return before + float(count(self._args, samples))
        except Exception:  # a number for the log is not worth a step
            log.exception("the number of floating point operations is not known")
            return before


def _before_any_update(optimizer: Any) -> dict[str, Any]:
    """`DistributedOptimizer.state_dict`, which expects a step, and cannot be loaded without one."""
    groups = optimizer.optimizer.state_dict()["param_groups"]
    return {
        "optimizer": {
            "param_groups": [{k: v for k, v in group.items() if k != "params"} | {"step": 0} for group in groups]
        }
    }


def with_random(content: dict[str, Any], rank: int, shard: Shard, aux: Mapping[int, bytes]) -> dict[str, Any]:
    """The content with Megatron's list of random states: one element, or one per data parallel rank where each has its
    own (--data-parallel-random-init).

    Args:
        rank, shard: whose content it is; aux: random states by rank.

    Raises:
        NotSaveable: this rank's random state of the step is not known.
    """
    args = content["args"]
    if getattr(args, "no_save_rng", False):
        return content
    own = aux.get(rank)
    if not own:
        raise NotSaveable(f"the random state of rank {rank} is not known for this step")
    if not getattr(args, "data_parallel_random_init", False):
        return content | {"rng_state": [native(own)]}
    missing = [rank for rank in shard.data_ranks if not aux.get(rank)]
    if missing:
        log.warning("the random state of ranks %s was out of reach: they get that of rank %d", missing, rank)
    return content | {"rng_state": [native(aux.get(rank) or own) for rank in shard.data_ranks]}


def _weights(state: Mapping[str, Any], known: Mapping[int, Any]) -> dict[str, Any]:
    """A model's state with what stands for some of its parameters, or was copied at the step's end, by `id`."""
    return {
        key: known.get(id(value), value.detach()) if isinstance(value, Tensor) else value
        for key, value in state.items()
    }


def file_in_checkpoint(step: int) -> str:
    """The path of this rank's file, relative to the directory of checkpoints; the names are Megatron's own."""
    from megatron.training.checkpointing import get_checkpoint_name

    return Path(get_checkpoint_name("", step)).as_posix()


def is_distributed(optimizer: Any) -> bool:
    """Whether the state of each optimizer is cut into slices."""
    parts = parts_of(optimizer)
    return bool(parts) and all(hasattr(one, "gbuf_ranges") for one in parts)
