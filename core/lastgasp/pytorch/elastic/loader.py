"""`ElasticLoader`: the data of a loop that may go on with fewer ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lastgasp.config import flag
from lastgasp.errors import ConfigError, UsageError
from lastgasp.pytorch.elastic import position  # noqa: F401  # says how its position is restored
from lastgasp.pytorch.elastic.buffers import buffer_values, put_buffers_back
from lastgasp.pytorch.elastic.exchanges import EXCHANGES, exchanged
from lastgasp.pytorch.elastic.gradients import GradientSum
from lastgasp.pytorch.elastic.loading import BEFORE, BEHIND, TRAINING, Loaded, Micro, Reader, Wanted, seed_all
from lastgasp.pytorch.elastic.plan import Plan, added, chained, due, owners, seed_of, signed, unsigned
from lastgasp.pytorch.loop.parts import ddp_of

Batch = Literal["constant", "scaled"]
NOT_HERE = (
    "make the ElasticLoader inside of the function that train() calls, once the process group is there, give it to the "
    "state, TorchState(..., elastic=loader), and iterate it by s.batches(loader); with Lightning return it from "
    "train_dataloader(), and have LastGasp among the callbacks"
)
UPDATED = (
    "parameters were changed inside of the loop over the micro-batches of a step, where each rank has gradients of its "
    "own: call optimizer.step() behind that loop"
)
EXCHANGED = (
    "ranks exchanged something within a micro-batch, and all ranks must come to it equally often: where ranks are "
    "missing the others do more than one micro-batch of a step. Exchange it behind the loop over them"
)
LEFT_EARLY = (
    "the loop over the micro-batches of a step was not run to its end, so that the step has no gradient: do not leave "
    "it by `break`, and run it in every step"
)


class ElasticLoader:
    """Batches for a loop under `train` whose number of ranks may change, and the gradient of each global batch.

        loader = ElasticLoader(dataset, net, batch_size=32, ranks=4, seed=1)
        with Session.open("ckpts", state=TorchState(net, optimizer, elastic=loader)) as s:
            for epoch in s.epochs(90):
                for step in s.batches(loader):
                    for images, labels in step:      # this rank's micro-batches: one, or also those of missing ranks
                        loss_of(net(images), labels).backward()
                    optimizer.step()                 # the gradients are now those of the global batch's mean

    A step has one micro-batch of `batch_size` samples for each rank of the complete job. The loss of one is the mean
    over its samples; the gradient after the inner loop is that of the mean over all samples of the step. Each sample
    of an epoch is used exactly once; the last step may be smaller, and some of its micro-batches empty, so that the
    inner loop has nothing to do (`drop_last` leaves it out).

    Random numbers are drawn from generators that are seeded anew for each micro-batch, by its place in the training.

    A module of Lightning's returns it from `train_dataloader` (docs/lightning.md).

    Args:
        dataset: map-style (`__len__`, `__getitem__`).
        model: its parameters get the gradients, and it is not wrapped by DDP: all ranks begin with rank 0's
            parameters and buffers. Buffers are those that the first micro-batch of each step leaves.
        batch_size: samples of a micro-batch.
        ranks: of the complete job, so the micro-batches of a step. Not read from the environment: what a script
            computes from it (a learning rate's schedule) must not change when ranks are missing.
        seed: of the order of the samples, and of random numbers.
        shuffle: another order in each epoch.
        drop_last: leave out an epoch's last step where it would be smaller: its micro-batches may have one sample,
            which BatchNorm refuses.
        canonical: sum gradients in one order, whoever has computed them: the result is then the same, to the last
            bit, with any number of ranks. See `GradientSum` for the cost.
        batch: "constant": a step has the micro-batches of all ranks of the complete job, those of missing ones are
            done by the others. "scaled": a step has one micro-batch for each rank that is there.
        collate_fn: makes a batch of a list of samples; default: torch's.
        num_workers, pin_memory: as for torch's DataLoader.

    Attributes:
        used: the digest of the samples of all steps so far, and what they depend on; part of each checkpoint.
        known: a `TorchState` has it.
        found_rigid: told why it cannot be used with fewer ranks, once training has shown that.

    Raises:
        ConfigError: a value that is not allowed; more ranks than `ranks`; a model wrapped by DDP.
    """

    def __init__(
        self,
        dataset: Any,
        model: nn.Module,
        batch_size: int,
        ranks: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        canonical: bool = False,
        batch: Batch = "constant",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.rank, self.world = _place()
        self.plan = Plan(samples=len(dataset), batch_size=batch_size, ranks=ranks, seed=seed, shuffle=shuffle,
                         drop_last=flag("drop_last", drop_last))  # fmt: skip
        _check(self.world, ranks, batch, model)
        self.model, self.epoch, self.offset, self._batch = model, 0, 0, batch
        self._reader = Reader(dataset, collate_fn, seed)
        self._workers, self._pinned = num_workers, pin_memory
        self.micros = ranks if batch == "constant" else self.world
        self._shares = owners(self.micros, self.world)
        self._sum = GradientSum(model.parameters(), self._shares, canonical)
        self._open: GlobalBatch | None = None
        self.known = False
        self.found_rigid: Callable[[str], object] = str
        self.used: dict[str, Any] = {"digest": "", "steps": 0, "samples": 0, "plan": self._depends_on()}
        self._like_rank_0([*model.parameters(), *model.buffers()])

    def _depends_on(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "samples": plan.samples, "batch_size": plan.batch_size, "ranks": plan.ranks, "seed": plan.seed,
            "shuffle": plan.shuffle, "batch": self._batch, **({"drop_last": True} if plan.drop_last else {}),
        }  # fmt: skip

    def _like_rank_0(self, tensors: list[Tensor]) -> None:
        for tensor in tensors if self.world > 1 else ():
            dist.broadcast(tensor.detach(), src=0)

    def __len__(self) -> int:
        """Steps of an epoch, from its beginning, with the ranks that are there now."""
        return self.plan.steps(self.micros)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is over this epoch."""
        self.epoch = epoch

    @property
    def told(self) -> str:
        """For people: which samples were used so far."""
        used = self.used
        return (f"{used['samples']} samples were used in {used['steps']} steps, each once as they are due: digest of "
                f"their numbers {used['digest'] or 'none'}")  # fmt: skip

    # -- a pass -------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[GlobalBatch]:
        """The steps of the epoch from `offset` on."""
        if not self.known or _place() != (self.rank, self.world):
            raise UsageError(NOT_HERE)
        self._require_same_plan()
        self._open = None
        epoch, order, begin, mine = self.epoch, self.plan.order(self.epoch), self.offset, self._shares[self.rank]

        def wanted() -> Iterator[Micro]:
            for at in self.plan.offsets(begin, self.micros):
                cut = self.plan.cut(at, self.micros)
                yield from (Micro(epoch, at, n, tuple(order[slice(*cut[n])].tolist())) for n in mine if _some(cut[n]))

        data = iter(DataLoader(
            self._reader, batch_size=None, sampler=Wanted(wanted), num_workers=self._workers,  # type: ignore[arg-type]
            pin_memory=self._pinned, generator=torch.Generator().manual_seed(0),
        ))  # fmt: skip
        for at in self.plan.offsets(begin, self.micros):
            if self._open is not None and not self._open.done:
                raise UsageError(LEFT_EARLY)
            cut = self.plan.cut(at, self.micros)
            loaded = [next(data) for n in mine if _some(cut[n])]
            self.offset = cut[-1][1]
            self._open = GlobalBatch(self, epoch, at, order, loaded)
            seed_all(seed_of(self.plan.seed, BEFORE, epoch, at))
            yield self._open

    def _require_same_plan(self) -> None:
        before, own = self.used["plan"], self._depends_on()
        if before != own:
            raise UsageError(f"the training that is resumed had an ElasticLoader with {before}, this one has {own}: "
                             "which samples were used cannot be told")  # fmt: skip

    # -- a step -------------------------------------------------------------------------------------------

    def micro_batches(self, step: GlobalBatch) -> Iterator[Any]:
        """For `GlobalBatch`: this rank's batches; behind the last one the gradients are summed."""
        plan, seed = self.plan, (self.plan.seed, TRAINING, step.epoch, step.offset)
        first = before = buffer_values(self.model)
        self._sum.begin()
        changes = self._sum.changes()
        for loaded in step.loaded:
            put_buffers_back(before)
            seed_all(seed_of(*seed, loaded.number))
            exchanges = exchanged()
            yield loaded.batch
            if exchanged() != exchanges and self._batch == "constant":
                self._exchanged()
            self._sum.take(loaded.number, loaded.size / step.samples)
            if loaded.number == 0:
                first = buffer_values(self.model)
        if self._sum.changes() != changes:
            raise UsageError(UPDATED)
        self._check_samples(step, self._sum.finish([signed(added(one.digest for one in step.loaded)),
                                                    sum(one.size for one in step.loaded)]))  # fmt: skip
        put_buffers_back(first)
        self._like_rank_0([now for module, name, _ in before if (now := module._buffers[name]) is not None])
        seed_all(seed_of(plan.seed, BEHIND, step.epoch, step.offset))

    def _exchanged(self) -> None:
        if self.world < self.plan.ranks:
            raise UsageError(EXCHANGED)
        self.found_rigid(EXCHANGES)

    def _check_samples(self, step: GlobalBatch, sums: list[int]) -> None:
        """Each sample that is due in this step was used once, by the word of all ranks."""
        digest, count = unsigned(sums[0]), sums[1]
        if digest != step.due or count != step.samples:
            raise UsageError(f"the ranks have not used the samples of this step, each of them once (epoch {step.epoch}"
                             f", {step.offset} samples before it): {count} were used, {step.samples} are due. Do all "
                             "ranks have the same dataset and the same settings?")  # fmt: skip
        used = self.used
        used["digest"], used["steps"] = chained(used["digest"], digest), used["steps"] + 1
        used["samples"] += count


class GlobalBatch:
    """One step: iterate it for the micro-batches that this rank does.

    Attributes:
        samples, micros: how many samples and micro-batches the step has, on all ranks.
        done: the gradients are those of the whole step.
    """

    def __init__(self, loader: ElasticLoader, epoch: int, offset: int, order: Any, loaded: list[Loaded]) -> None:
        cut = loader.plan.cut(offset, loader.micros)
        self.epoch, self.offset, self.loaded, self.done = epoch, offset, loaded, False
        self.samples, self.micros = cut[-1][1] - offset, loader.micros
        self.due = due(epoch, offset, order, cut)
        self._loader, self._begun = loader, False

    def __len__(self) -> int:
        """This rank's micro-batches."""
        return len(self.loaded)

    def __iter__(self) -> Iterator[Any]:
        """Each micro-batch once.

        Raises:
            UsageError: a second time; or the ranks have not used the samples of the step.
        """
        if self._begun:
            raise UsageError("the micro-batches of a step can be gone through once")
        self._begun = True
        try:
            yield from self._loader.micro_batches(self)
            self.done = True
        finally:
            if not self.done:
                self._loader._sum.clear()  # an optimizer leaves parameters without a gradient alone


def _some(bounds: tuple[int, int]) -> bool:
    return bounds[0] < bounds[1]


def _place() -> tuple[int, int]:
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _check(world: int, ranks: int, batch: str, model: Any) -> None:
    if batch not in ("constant", "scaled"):
        raise ConfigError("batch", batch, "'constant' or 'scaled'", "Leave it out for a constant global batch.")
    if world > ranks:
        raise ConfigError("ranks", ranks, f"at least {world}, the ranks that the job has now",
                          "It is the number of ranks of the complete job.")  # fmt: skip
    if ddp_of(model) is not None:
        raise ConfigError("model", "DistributedDataParallel", "the model itself, without a wrapper",
                          "An ElasticLoader sums the gradients of all micro-batches.")  # fmt: skip
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("model", type(model).__name__, "a model with parameters that are trained", "Give that one.")
