"""Loaders that Hugging Face accelerate has prepared."""

from __future__ import annotations

import pickle
from typing import Any

from lastgasp.pytorch.position.generators import OwnGenerators
from lastgasp.pytorch.position.loaders import StreamPosition, is_map
from lastgasp.pytorch.position.protocol import PREPARED, LoaderPosition, PassStart
from lastgasp.pytorch.position.registry import register_loader
from lastgasp.pytorch.position.samplers import index_sampler
from lastgasp.pytorch.rng import RngRecorder

_BEGUN = "_initial_iter_for_state_dict"
"""Of torchdata's StatefulDataLoader (0.11): whether its `state_dict` has begun the next pass."""


_AT_ONCE = ("torch.utils.data.sampler", "torch.utils.data.distributed", "accelerate.data_loader")
"""Modules of samplers that draw all their random numbers when they are iterated."""


class AcceleratedPosition(StreamPosition):
    """A loader of `Accelerator.prepare`, which fetches one batch ahead and counts its passes, by which it shuffles.

    It is iterated again. Its `state_dict` is that of a loader that it may hold (`use_stateful_dataloader`), which knows
    nothing of the batch ahead where there is one rank, and is missing where that loader is torch's own. With such a
    loader and workers the order of the first pass is drawn when accelerate makes it.
    """

    live = True

    def __init__(self, loader: Any, recorder: RngRecorder) -> None:
        super().__init__(loader, recorder)
        made_here = [] if loader.num_workers else [loader.dataset, loader.collate_fn]
        # its samplers lie deeper than in a loader of torch's, behind the one that takes this rank's share
        self._own = OwnGenerators([index_sampler(loader), loader.generator, *made_here], recorder.used)
        self._number: int | None = 0
        self._unlike = False

    @property
    def ahead(self) -> bool:
        """It makes one batch ahead in this process, of samples whose order does not depend on when that happens.

        Only the batch that waits has then to be made under the random state of its own time.
        """
        held = self._held()
        if type(self.loader).__name__ != "DataLoaderShard" or not is_map(held) or held.num_workers:
            return False
        sampler = held.batch_sampler or held.sampler
        while sampler is not None:
            if type(sampler).__module__ not in _AT_ONCE:
                return False
            sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
        return True

    @property
    def inexact(self) -> str:
        """By a loader that was another one before."""
        return super().inexact or (PREPARED if self._unlike else "")

    def begin(self) -> None:
        """Remember the number of this pass, too."""
        super().begin()
        self.start.generators = []  # they are among its own, of which some samplers make one in their first pass only
        self._number = int(getattr(self.loader, "iteration", 0))
        begun = bool(getattr(self._held(), _BEGUN, False))
        self.start.counters = pickle.dumps((self._number, getattr(self._sampler(), "initial_seed", None), begun))

    def resume(self, start: PassStart, state: bytes, consumed: int, over: bool = False) -> int | None:
        """Count as the loader did when the pass began, or when it was over."""
        # the loader of a run before may not have been accelerate's: then there are its generators alone
        found = pickle.loads(state) if state.startswith(pickle.PROTO) else (None, state)
        following, generators = found if isinstance(found, tuple) else (None, b"")
        counted = pickle.loads(start.counters) if start.counters else (following, None)
        self._unlike = not isinstance(found, tuple) or not isinstance(counted, tuple)
        number, seed, *rest = counted if isinstance(counted, tuple) else (None, None)
        begun = any(rest)  # older checkpoints, which have none of it, are not of such loaders
        if seed is not None:
            self._sampler().initial_seed = seed
        self._number = following if over else number
        if self._number is not None and hasattr(self.loader, "iteration"):
            self.loader.iteration = self._number
        self._begin_ahead(begun and not over)
        return super().resume(start, generators, consumed, over)

    def state(self) -> bytes:
        """The number of the next pass, if this one ends here, and the generators."""
        ended = bool(getattr(self.loader, "end_of_dataloader", False))
        return pickle.dumps(((self._number or 0) + ended, super().state()))

    def _begin_ahead(self, begun: bool) -> None:
        """A loader of torchdata's is asked for its state when accelerate makes it, which begins its first pass."""
        held = self._held()
        if hasattr(held, _BEGUN) and getattr(held, _BEGUN) != begun:
            held.load_state_dict({})
            if begun:
                held.state_dict()

    def _held(self) -> Any:
        return getattr(self.loader, "base_dataloader", None)

    def _sampler(self) -> Any:
        """The one that shuffles, behind those that take shares."""
        return getattr(self.loader, "get_sampler", lambda: None)()


def fetches_ahead(position: LoaderPosition) -> bool:
    """As `AcceleratedPosition.ahead`."""
    return isinstance(position, AcceleratedPosition) and position.ahead


register_loader("accelerate.data_loader:DataLoaderAdapter", AcceleratedPosition)
