"""Which Trainers can go on with fewer ranks."""

from __future__ import annotations

from typing import Any

from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, SeedableRandomSampler
from accelerate.utils import DDPCommunicationHookType
from torch.nn import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, SequentialSampler
from transformers import Trainer

from lastgasp.adapter import torch as shared
from lastgasp.adapter.again import Fewer
from lastgasp_transformers.seats import Loaders

_OTHERWISE = ("_inner_training_loop", "_run_epoch", "get_batch_samples", "_get_num_items_in_batch",
              "set_initial_training_values", "_track_num_input_tokens")  # fmt: skip
"""Methods of Trainer's that must be as they are: they go through the batches of a step."""
_IN_BACKWARD = ("lomo", "layerwise")
"""Optimizers that update within the backward pass."""


def fewer_of(trainer: Any, loader: Any, data: shared.PrefetchedData, state: shared.TorchState) -> Fewer:
    """Whether this training can go on with fewer ranks.

    Args:
        loader: accelerate's, of the training data; data: follows it.
        state: of the model and its optimizer.
    """
    why = _training(trainer, state) or _data(trainer, loader.first if isinstance(loader, Loaders) else loader, data)
    return Fewer(why=why) if why else Fewer(may=True)


def _training(trainer: Any, state: shared.TorchState) -> str:
    args, ddp, cls = trainer.args, trainer.accelerator.ddp_handler, type(trainer)
    if not isinstance(trainer.model_wrapped, DistributedDataParallel):
        return "it has one rank" if args.world_size == 1 else "its model is not in DDP itself (torch_compile)"
    for name in (*_OTHERWISE, "_save_rng_state"):
        if getattr(getattr(cls, name, None), "__module__", "") != Trainer.__module__:
            return f"{cls.__name__} has a {name} of its own, or none"
    if shared.exchanged() is None:
        return "its process group does not count what ranks exchange in a micro-batch"
    if args.save_on_each_node:
        return "save_on_each_node=True: a host whose first rank is missing would save nothing"
    if any(isinstance(one, SyncBatchNorm) for one in trainer.model.modules()):
        return "SyncBatchNorm: ranks do unequal numbers of micro-batches"
    if next(trainer.model.buffers(), None) is not None and state.per_rank_buffers(2):
        return "ddp_broadcast_buffers=False: each rank has buffers of its own"
    if ddp is not None and (ddp.static_graph or ddp.comm_hook != DDPCommunicationHookType.NO):
        return "DDP has a static graph, or a communication hook"
    optimizer = str(getattr(args.optim, "value", args.optim))
    if any(name in optimizer for name in _IN_BACKWARD):
        return f"optim={optimizer}: it updates within the backward pass"
    each = trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch")
    return "sync_each_batch=True: gradients are exchanged for each micro-batch" if each else ""


def _data(trainer: Any, loader: Any, data: shared.PrefetchedData) -> str:
    shard: Any = getattr(loader, "batch_sampler", None)  # followed, so that it is behind a proxy
    cut = getattr(shard, "batch_sampler", None)
    if trainer.args.ignore_data_skip:
        return "ignore_data_skip=True: samples would be used twice"
    if not data.followed or not isinstance(loader, DataLoaderShard) or shard.__class__ is not BatchSamplerShard:
        return "its data are not cut into shards of a map-style data set (as an IterableDataset is not)"
    if not shard.even_batches or shard.split_batches or loader.rng_types:
        return "accelerator_config with even_batches=False, split_batches=True or use_seedable_sampler=False"
    if cut.__class__ is not BatchSampler or cut.sampler.__class__ not in (SeedableRandomSampler, SequentialSampler):
        return "the order of its data is neither that of the data set nor random alone (train_sampling_strategy)"
    return "the data set or its collator draws from random generators of its own" if data.of_makers else ""


def settings_of(trainer: Any, loader: Any) -> list[Any]:
    """What makes a step: it must be the same to all ranks, as it is where all were started alike."""
    args = trainer.args
    return [args.gradient_accumulation_steps, args.per_device_train_batch_size, args.num_train_epochs, args.max_steps,
            args.average_tokens_across_devices, args.dataloader_drop_last, args.seed, args.data_seed, len(loader),
            len(loader.dataset)]  # fmt: skip
