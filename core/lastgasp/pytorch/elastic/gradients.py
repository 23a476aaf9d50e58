"""The gradient of a global batch from those of its micro-batches, whichever rank has computed them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lastgasp.errors import UsageError

UNUSED = (
    "the gradients of the step before are still there, and no update has used them: the gradient of this step takes "
    "their place. Call optimizer.step() in each step of an ElasticLoader, or zero_grad() to drop them; a larger "
    "batch_size stands for accumulation"
)


class _Kind:
    """The parameters of one kind of number on one device, laid out one after the other."""

    def __init__(self, places: list[int], parameters: list[nn.Parameter], world: int) -> None:
        self.places, self.parameters = places, parameters
        self._sizes = [p.numel() for p in parameters]
        self.part = -(-sum(self._sizes) // world)
        self._length = self.part * world

    def new(self) -> Tensor:
        """Zeros for all of them; a multiple of the ranks' number, so that each can sum an equal part."""
        first = self.parameters[0]
        return torch.zeros(self._length, dtype=first.dtype, device=first.device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The gradients in such a tensor."""
        begins = itertools.accumulate(self._sizes, initial=0)
        places = zip(begins, self._sizes, self.parameters, strict=False)
        return [flat[begin : begin + size].view(p.shape) for begin, size, p in places]


class GradientSum:
    """Sums the weighted gradients of the micro-batches of a step, over all ranks.

    Args:
        parameters: those that are trained, in the same order on all ranks.
        shares: the micro-batches that each rank does.
        canonical: add them in the order of the micro-batches, so that the result does not depend on who has computed
            them, down to the last bit. Takes the memory of one gradient for each of this rank's micro-batches, and
            two exchanges instead of one (`all_to_all`, `all_gather`), which together move as many bytes as an
            all_reduce as long as each rank has one micro-batch.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], shares: Sequence[range], canonical: bool) -> None:
        self._all = list(parameters)
        self._world = len(shares)
        self._shares, self._canonical = shares, canonical
        self._mine = shares[dist.get_rank()] if self._world > 1 else shares[0]
        self._lay_out()

    def _lay_out(self) -> None:
        self._trained = [p.requires_grad for p in self._all]
        self._parameters = [p for p in self._all if p.requires_grad]
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for place, parameter in enumerate(self._parameters):
            kinds.setdefault((parameter.dtype, parameter.device), []).append(place)
        self._kinds = [_Kind(places, [self._parameters[n] for n in places], self._world) for places in kinds.values()]
        self._rows = [[kind.new() for _ in (self._mine if self._canonical else [0])] for kind in self._kinds]
        self._used = [0] * len(self._parameters)
        self._finished = -1

    def changes(self) -> int:
        """Changes with every change of a parameter."""
        return sum(parameter._version for parameter in self._parameters)

    def clear(self) -> None:
        """No parameter has a gradient."""
        for parameter in self._all:
            parameter.grad = None

    def begin(self) -> None:
        """A step begins, perhaps with other parameters that are trained.

        Raises:
            UsageError: no update has used the gradients of the step before, and a GradScaler would not have skipped it.
        """
        left = self._finished == self.changes() and [p.grad for p in self._parameters if p.grad is not None]
        if left and any(bool(grad.any()) for grad in left) and all(bool(grad.isfinite().all()) for grad in left):
            raise UsageError(UNUSED)
        if [p.requires_grad for p in self._all] != self._trained:
            self._lay_out()
        self.clear()
        self._used = [0] * len(self._parameters)
        for rows in self._rows:
            for row in rows:
                row.zero_()

    def take(self, micro: int, weight: float) -> None:
        """The parameters hold the gradient of this micro-batch, whose part in the mean is `weight`.

        Raises:
            UsageError: a gradient is sparse.
        """
        row = micro - self._mine.start if self._canonical else 0
        for kind, rows in zip(self._kinds, self._rows, strict=True):
            for place, parameter, sum_ in zip(kind.places, kind.parameters, kind.views(rows[row]), strict=True):
                if parameter.grad is None:
                    continue
                if parameter.grad.layout != torch.strided:
                    raise UsageError("an ElasticLoader cannot sum sparse gradients: use Embedding(sparse=False)")
                sum_.add_(parameter.grad, alpha=weight)
                self._used[place] = 1
        self.clear()

    def finish(self, told: Sequence[int]) -> list[int]:
        """All ranks call it together: the parameters then hold the mean's gradient, everywhere the same.

        Args:
            told: numbers of this rank, in 64 bits.

        Returns:
            Their sums over all ranks, in 64 bits.
        """
        numbers = self._agreed([*told, *self._used])
        used = numbers[len(told) :]
        for kind, rows in zip(self._kinds, self._rows, strict=True):
            sum_ = self._in_order(rows, kind.part) if self._canonical else self._anyhow(rows[0])
            for place, parameter, view in zip(kind.places, kind.parameters, kind.views(sum_), strict=True):
                parameter.grad = view if used[place] else None
        self._finished = self.changes()
        return numbers[: len(told)]

    def _agreed(self, numbers: list[int]) -> list[int]:
        if self._world == 1:
            return numbers
        device = self._kinds[0].parameters[0].device if dist.get_backend() == "nccl" else torch.device("cpu")
        sums = torch.tensor(numbers, dtype=torch.int64, device=device)
        dist.all_reduce(sums)
        return [int(number) for number in sums.tolist()]

    def _anyhow(self, row: Tensor) -> Tensor:
        if self._world > 1:
            dist.all_reduce(row)
        return row

    def _in_order(self, rows: list[Tensor], part: int) -> Tensor:
        """Each rank gets one part of all micro-batches' gradients, sums it in their order, and gives it to all."""
        if self._world == 1:
            return _summed(rows)
        ours = torch.stack(rows).view(len(rows), self._world, part).transpose(0, 1).contiguous()
        all_ = torch.empty(sum(map(len, self._shares)) * part, dtype=ours.dtype, device=ours.device)
        sent = [len(rows) * part] * self._world
        dist.all_to_all_single(all_, ours.view(-1), [len(share) * part for share in self._shares], sent)
        whole = torch.empty(self._world * part, dtype=ours.dtype, device=ours.device)
        dist.all_gather(list(whole.view(self._world, part)), _summed(list(all_.view(-1, part))))
        return whole


def _summed(rows: list[Tensor]) -> Tensor:
    found = rows[0].clone()
    for row in rows[1:]:
        found.add_(row)
    return found
