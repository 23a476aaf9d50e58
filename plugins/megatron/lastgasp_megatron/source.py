"""The state of a Megatron run as the engine's port (ports.StateSource): genuine `iter_*` directories, format torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

from torch import Tensor

from lastgasp.adapter import GaspConfig, ManifestWriter, NotSaveable, SaveResult, require_alike
from lastgasp.adapter.checkpoint import SavedPart, Staged, part_of, prune
from lastgasp.adapter.testing import faults
from lastgasp.adapter.torch import save_verified
from lastgasp_megatron.aux_state import RandomState
from lastgasp_megatron.compose import Composer, file_in_checkpoint, is_distributed
from lastgasp_megatron.devices import Device
from lastgasp_megatron.merge import merged, weights_of_masters, weights_of_merged
from lastgasp_megatron.shards import Exchange, slice_of
from lastgasp_megatron.sound import unsound
from lastgasp_megatron.steps import Boundary, Steps, is_stub, only
from lastgasp_megatron.tracker import LAYOUT, checkpoint_path, write_tracker


class MegatronSource:
    """Called by the engine's threads while the training thread waits at the gate, is stuck, or has raised.

    Args:
        steps, random: what the training thread records; composer: builds a rank's file.
        device: where the weights are; writer: names who writes.
        alike: whether all replicas were found to hold the same.

    Attributes:
        unsound: why nothing can be saved for as long as this process lives; empty where it can.
    """

    def __init__(
        self,
        steps: Steps,
        random: RandomState,
        composer: Composer,
        device: Device,
        writer: ManifestWriter,
        config: GaspConfig,
        *,
        alike: Callable[[], bool] = lambda: True,
    ) -> None:
        self._steps, self._random, self._composer, self._device = steps, random, composer, device
        self._optimizer, self._shard = only(composer.optimizer), composer.shard
        self._writer, self._config, self._alike = writer, config, alike
        self.rank = writer.place.rank
        self._orders = itertools.count(1)
        self._order = 0
        self.unsound = ""
        self._exchange = Exchange(config.directory, writer.place, self._shard, config.save_timeout)
        if self.rank == 0:
            self._exchange.clear_older()

    @property
    def buffer_fd(self) -> int:
        """The crash-safe buffer's descriptor."""
        return self._random.recorder.fd

    def capture(self, step: int) -> bytes:
        """This rank's random state of `step`; empty when it is no longer known."""
        return self._random.read(step)

    # -- saving -----------------------------------------------------------------------------------

    def save(self, step: int, aux: Mapping[int, bytes], reason: str) -> SavedPart:
        """Write this rank's part of `iter_N` under a temporary name, or its slice for the rank that merges."""
        require_alike(self._alike())
        with self._device.reading():
            return self._save(step, aux)

    def _save(self, step: int, aux: Mapping[int, bytes]) -> SavedPart:
        self._order = order = next(self._orders)
        boundary = self._require(step)
        self._require_sound()
        aux = {rank: data for rank, data in aux.items() if data} | {self.rank: self._random.read(step)}
        target = checkpoint_path(self._config.directory, step)
        slices = is_distributed(self._optimizer) and not is_stub(self._optimizer)
        staged = Staged(target, LAYOUT, sha256=self._config.sha256)
        if slices and self._shard.part > 0:
            return self._save_slice(boundary, staged)
        try:
            weights = self._save_merged(boundary, staged, order) if slices else weights_of_masters(self._optimizer)
            save_verified(self._composer.compose(boundary, weights, aux), staged, file_in_checkpoint(step))
            faults.fire_at("gasp_save", step)
            part = part_of(staged)
            self._require(step)
        except BaseException:
            staged.discard()
            raise
        begun = staged.first_byte_ns or 0
        return SavedPart(step=step, staged=staged, nbytes=staged.nbytes, first_byte_ns=begun, part=part)

    def _require(self, step: int) -> Boundary:
        steps = self._steps
        boundary = steps.boundary
        if steps.inside:
            raise NotSaveable(f"the update after step {steps.step} has begun; step {step} is gone")
        if boundary.step != step:
            raise NotSaveable(f"this rank is at step {boundary.step}, not at {step}")
        if boundary.adam != steps.counted():
            raise NotSaveable(f"the optimizer has made {steps.counted()} updates, not {boundary.adam}")
        return boundary

    def _require_sound(self) -> None:
        problem = self.unsound or unsound(self._optimizer, self._steps.settled and self._device.copied())
        if problem:
            raise NotSaveable(problem)

    def _save_slice(self, boundary: Boundary, staged: Staged) -> SavedPart:
        found = slice_of(self._optimizer, self._shard.parts)
        self._require(boundary.step)
        nbytes = self._exchange.put(boundary.step, found)
        faults.fire_at("gasp_save", boundary.step)
        return SavedPart(step=boundary.step, staged=staged, nbytes=nbytes)

    def _save_merged(self, boundary: Boundary, staged: Staged, order: int) -> dict[int, Tensor]:
        """Write `distrib_optim.pt`; returns the weights that follow from it."""
        step, others = boundary.step, range(1, self._shard.parts)
        slices = [slice_of(self._optimizer, self._shard.parts)]
        self._require(step)
        slices += [self._exchange.take(step, part, lambda: self._order != order) for part in others]
        state = merged(self._optimizer, slices)
        name = file_in_checkpoint(step).rpartition("/")[0] + "/distrib_optim.pt"
        save_verified(state, staged, name)
        return weights_of_merged(self._optimizer, state)

    # -- publishing -------------------------------------------------------------------------------

    def publish(self, result: SaveResult, parts: Mapping[int, bytes]) -> str:
        """Bring all savers' files together and make them visible; then the tracker, then remove older gasps."""
        assert isinstance(result, SavedPart)
        step, target = result.step, result.staged.target
        kept = result.publish(parts, self._writer.provenance(step, "gasp", self._writer.newest_beside(target, LAYOUT)))
        write_tracker(self._config.directory, step)
        self._exchange.close(step)
        prune(self._config, LAYOUT, target, self._writer.place.job)
        return kept

    def discard(self, result: SaveResult) -> None:
        """Remove what was written."""
        assert isinstance(result, SavedPart)
        result.staged.discard()
        self._exchange.drop(result.step)
