"""The state of a Megatron run as the engine's port (ports.ShardSource): genuine `iter_*` directories, format torch."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from lastgasp.adapter import GaspConfig, ManifestWriter, NotSaveable, SaveResult, cause_of, require_alike
from lastgasp.adapter.arenas import Arena, Wanted
from lastgasp.adapter.checkpoint import SavedPart, Staged, part_of, prune
from lastgasp.adapter.testing import faults
from lastgasp.adapter.torch import OnDemand
from lastgasp_megatron.aux_state import RandomState
from lastgasp_megatron.compose import Composer, file_in_checkpoint, is_distributed
from lastgasp_megatron.devices import Device, HostCopies
from lastgasp_megatron.image import Image, Piece, decoded, encoded, problem
from lastgasp_megatron.merge import Weight, layout_of, weights_of_masters, weights_of_merged
from lastgasp_megatron.own_buffers import encoded as encoded_buffers
from lastgasp_megatron.own_buffers import limit, taken, with_own
from lastgasp_megatron.shards import Exchange, Slice, held_of
from lastgasp_megatron.sound import unsound
from lastgasp_megatron.steps import Boundary, Steps, parts_of
from lastgasp_megatron.tracker import LAYOUT, checkpoint_path, write_tracker
from lastgasp_megatron.writing import passed_on, slices_of, write_file

log = logging.getLogger("lastgasp")


class MegatronSource:
    """Called by the engine's threads while the training thread waits at the gate, is stuck, or has raised.

    Args:
        steps, random: what the training thread records; composer: builds a rank's file.
        device: where the weights are; writer: names who writes.
        alike: whether all replicas were found to hold the same.
        note: reports what people must know (`Session.note`).
        training: which training of the script (`trainings.name_of`).

    Attributes:
        unsound: why nothing can be saved for as long as this process lives; empty where it can.
        looked: whether that is known, which takes an update.
        arena: this rank's, where it holds what no other rank has; else None.
        present: the manifests that were there when training began (`CheckpointSelector.present`).
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
        note: Callable[[str], None] = lambda text: None,
        training: str = "",
    ) -> None:
        self._note, self._training = note, training
        self._steps, self._random, self._composer, self._device = steps, random, composer, device
        self._optimizer, self._shard = composer.optimizer, composer.shard
        self._writer, self._config, self._alike = writer, config, alike
        self._host, self._most = HostCopies(), limit(writer.place.world_size)
        self._values = OnDemand(self._own_buffers, apart=device.device.type != "cpu")
        self.rank = writer.place.rank
        self._orders = itertools.count(1)
        self._order = 0
        self.unsound, self.looked = "", False
        self.arena: Arena | None = None
        self.present: frozenset[str] | None = None
        self._exchange = Exchange(config.directory, writer.place, config.save_timeout)
        if self.rank == 0:
            self._exchange.clear_older()

    @property
    def buffer_fd(self) -> int:
        """The crash-safe buffer's descriptor."""
        return self._random.recorder.fd

    def capture(self, step: int) -> bytes:
        """This rank's random state of `step`; empty when it is no longer known."""
        return self._random.read(step)

    def values(self, step: int) -> bytes | None:
        """The module buffers of `step` that are this rank's own; None while they are being made."""
        return self._values.poll(step)

    def _own_buffers(self, step: int) -> bytes:
        try:
            boundary = self._steps.boundary
            if boundary.step == step and not self._steps.inside:
                with self._device.reading():
                    return encoded_buffers(taken(boundary.kept, self._most, check=True))
        except Exception as error:  # the step matters more; who goes on from it says what is missing
            log.warning("the module buffers of rank %d could not be copied: %s", self.rank, cause_of(error))
        return b""

    # -- what this rank holds ---------------------------------------------------------------------

    def image(self, boundary: Boundary) -> Image:
        """What it holds of that step, which is the one that the optimizer has completed last. Nothing is copied.

        Raises:
            NotSaveable: a part of the optimizer's state is missing.
        """
        parts, shard, step = parts_of(self._optimizer), self._shard, boundary.step
        slices = is_distributed(self._optimizer)
        content = None
        if not slices or shard.writes:
            weights: dict[int, Weight] = {}
            for place, one in enumerate(parts):
                weights |= weights_of_merged(one, place) if slices else weights_of_masters(one)
            content = self._composer.compose(boundary, weights)
        return Image(
            rank=self.rank,
            shard=shard,
            step=step,
            file=file_in_checkpoint(step),
            content=content,
            held=tuple(held_of(one, cut.parts) for one, cut in zip(parts, shard.cuts, strict=True)) if slices else (),
            layouts=tuple(layout_of(one) for one in parts) if slices else (),
            aux=self._random.read(step),
            looked=self.looked or not self._steps.updated,
            training=self._training,
            own=taken(boundary.kept, self._most),
        )

    def payload(self, boundary: Boundary) -> list[Piece]:
        """The same for the arena. On the training thread, between an update and the next.

        Raises:
            ValueError: there is something in the way.
        """
        try:
            if self.unsound:
                raise NotSaveable(self.unsound)
            return encoded(self.image(boundary), self._host)
        except Exception as error:  # whatever it is, it costs the arena and not the job
            raise ValueError(cause_of(error)) from error

    # -- saving -----------------------------------------------------------------------------------

    def save(self, step: int, aux: Mapping[int, bytes], reason: str) -> SavedPart:
        """Write this rank's part of `iter_N` under a temporary name, or its slice for the rank that merges."""
        return self.save_shards(step, aux, reason, Wanted(own=True, arenas={}, common=self.rank))

    def save_shards(self, step: int, aux: Mapping[int, bytes], reason: str, wanted: Wanted) -> SavedPart:
        """The same for this rank's part, if it is wanted, and for those of the arenas."""
        require_alike(self._alike())
        self._order = order = next(self._orders)
        wanted.verify()
        images = [decoded(payload) for payload in wanted.arenas.values()]
        for image in images:
            if why := problem(image):
                raise NotSaveable(f"the arena of rank {image.rank}: {why}")
        known = {image.rank: with_own(image) for image in images} | {rank: data for rank, data in aux.items() if data}
        if not wanted.own:
            return self._write(step, None, images, known, order)
        with self._own(step) as own:
            return self._write(step, own, images, known | {self.rank: own.aux}, order)

    @contextmanager
    def _own(self, step: int) -> Iterator[Image]:
        with self._device.reading():
            boundary = self._require(step)
            self._require_sound()
            if self._steps.cut_short():
                self._note(f"the evaluation behind iteration {step} was cut short and is not repeated: no log has its "
                           "result, and later ones have the samples that they would have had")  # fmt: skip
            image = self.image(boundary)
            self._require_of_the_step(image, boundary)
            yield image

    def _require_of_the_step(self, image: Image, boundary: Boundary) -> None:
        if image.content is None:
            return
        for text in filter(None, (boundary.kept.missing, self._steps.logged_late())):
            self._note(text)
        if moved := self._steps.moved_on():
            raise NotSaveable(f"{moved} has changed since the end of step {boundary.step}, and had not before, so "
                              "that no copy was made")  # fmt: skip
        if extra := self._steps.extra_moved_on():
            self._note(f"{extra} (get_extra_state) differs from the end of step {boundary.step}, and had not before: "
                       "it is saved as it is now. A resume will not be bit-equal where it matters")  # fmt: skip

    def _require(self, step: int) -> Boundary:
        steps = self._steps
        boundary = steps.boundary
        if steps.inside:
            raise NotSaveable(f"the update after step {steps.step} has begun; step {step} is gone")
        if boundary.step != step:
            raise NotSaveable(f"this rank is at step {boundary.step}, not at {step}")
        if boundary.adam != steps.counted():
            made, known = (" and ".join(map(str, counts)) for counts in (steps.counted(), boundary.adam))
            raise NotSaveable(f"the optimizer has made {made} updates, not {known}")
        return boundary

    def _require_sound(self) -> None:
        found = self.unsound or unsound(self._optimizer, self._steps.settled and self._device.copied())
        if found:
            raise NotSaveable(found)

    def _write(
        self, step: int, own: Image | None, images: list[Image], aux: Mapping[int, bytes], order: int
    ) -> SavedPart:
        images = [own, *images] if own is not None else images
        staged = Staged(checkpoint_path(self._config.directory, step), LAYOUT, sha256=self._config.sha256)
        try:
            slices = {name: found for image in images for name, found in slices_of(image).items()}
            if own is not None:
                self._require(step)
            files = [image for image in images if image.content is not None]
            here = {image.shard.folder for image in files}
            away = {name for image in images for name in passed_on(image, here)}
            nbytes = sum(self._exchange.put(step, name, slices[name]) for name in sorted(away))
            for image in files:
                write_file(image, slices, aux, staged, lambda name: self._taken(step, name, order))
            faults.fire_at("gasp_save", step)
            part = part_of(staged) if files else b""
            if own is not None and files:
                self._require(step)
        except BaseException:
            staged.discard()
            self._exchange.drop(step)
            raise
        begun = staged.first_byte_ns or 0
        return SavedPart(step=step, staged=staged, nbytes=staged.nbytes + nbytes, first_byte_ns=begun, part=part)

    def _taken(self, step: int, name: str, order: int) -> Slice:
        return self._exchange.take(step, name, lambda: self._order != order)

    # -- publishing -------------------------------------------------------------------------------

    def publish(self, result: SaveResult, parts: Mapping[int, bytes]) -> str:
        """Bring all savers' files together and make them visible; then the tracker, then remove older gasps."""
        assert isinstance(result, SavedPart)
        step, target = result.step, result.staged.target
        about = self._writer.provenance(step, "gasp", self._writer.newest_beside(target, LAYOUT))
        kept = result.publish(parts, about, present=self.present)
        write_tracker(self._config.directory, step)
        self._exchange.close(step)
        prune(self._config, LAYOUT, target, self._writer.place)
        return kept

    def discard(self, result: SaveResult) -> None:
        """Remove what was written."""
        assert isinstance(result, SavedPart)
        result.staged.discard()
        self._exchange.drop(result.step)
