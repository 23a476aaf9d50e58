"""What the ranks before have left in arenas becomes a checkpoint, before one is chosen: Megatron itself then loads it.

So no step is lost where all ranks were killed at once. It is written as after a fault: the ranks whose file does not
hold it all pass their slices on, and the others write.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from lastgasp.adapter import CheckpointError, GaspConfig, LastgaspError, Place, Session, cause_of
from lastgasp.adapter.arenas import left_by_all
from lastgasp.adapter.checkpoint import SavedPart, Staged, part_of, prune
from lastgasp_megatron.image import Image, decoded, problem
from lastgasp_megatron.own_buffers import with_own
from lastgasp_megatron.shards import Exchange
from lastgasp_megatron.tracker import LAYOUT, checkpoint_path, write_tracker
from lastgasp_megatron.trainings import name_of, writer_of
from lastgasp_megatron.writing import passed_on, slices_of, write_file

log = logging.getLogger("lastgasp")


class _Part(msgspec.Struct, frozen=True):
    """What a rank has written, or why it could not."""

    part: bytes = b""
    problem: str = ""


_PARTS = msgspec.msgpack.Decoder(_Part)


def save_left(session: Session, place: Place, config: GaspConfig, number: int = 0) -> None:
    """Write what was left, where no checkpoint is as new; all ranks call it together, before they choose one.

    It is kept until training begins, for an attempt that follows if this one does not come to that. What cannot be
    written, such as what another training of the script has left, costs that step, with a note, and not the job.

    Args:
        number: of the training in its script (`Trainings`).

    Raises:
        ControlError, DeadlineExceeded: the ranks could not agree.
    """
    writing = _Writing(session, place, config, number)
    try:
        with left_by_all(session, writing.why_not, newer=True) as taken:
            if taken is None:
                return
            written = writing.write(taken.step)
        # The block has ended: what was read was not changed meanwhile.
        if written and writing.publish() and place.rank == 0:
            log.warning("step %d was left in memory by ranks that are gone: written to %s", taken.step,
                        checkpoint_path(config.directory, taken.step))  # fmt: skip
    finally:
        writing.close()


class _Writing:
    def __init__(self, session: Session, place: Place, config: GaspConfig, number: int) -> None:
        self._number, self._training = number, name_of(number, config.directory)
        self._session, self._place, self._config = session, place, config
        self._exchange = Exchange(config.directory, place, config.save_timeout)
        self._image: Image | None = None
        self._staged: Staged | None = None
        self._parts: dict[int, bytes] = {}
        self._step = 0

    def why_not(self, payload: memoryview) -> str:
        """Why it cannot be written; empty if it can."""
        try:
            self._image = image = decoded(payload)
            found = problem(image)
            if image.training != self._training:
                return f"it is of {image.training}, and this is {self._training}"
        except Exception as error:  # whatever it is, it costs the step and not the job
            return f"it cannot be read ({cause_of(error)})"
        return found if image.rank == self._place.rank else f"it is of rank {image.rank}"

    def write(self, step: int) -> bool:
        """The slices first, then the files; whether all ranks have done their part."""
        image = self._image
        assert image is not None
        self._step = step
        random = self._session.gather("arenas/random", with_own(image))
        if not self._agreed("slices", lambda: self._put(image)):
            return False
        return self._agreed("files", lambda: self._file(image, dict(enumerate(random))))

    def publish(self) -> bool:
        """By the first rank that has written a file; whether it is there."""
        return self._agreed("published", self._published)

    def close(self) -> None:
        """Remove what is left of it. Idempotent."""
        self._image = None
        if self._staged is not None:
            self._staged.discard()
        self._exchange.drop(self._step)

    def _agreed(self, what: str, act: Callable[[], bytes]) -> bool:
        """Do this rank's part, and hear of the others'; what fails on one is noted."""
        try:
            done = _Part(act())
        except (OSError, LastgaspError, ValueError, RuntimeError) as error:
            done = _Part(problem=f"rank {self._place.rank}: {cause_of(error)}")
        found = [_PARTS.decode(one) for one in self._session.gather(f"arenas/{what}", msgspec.msgpack.encode(done))]
        self._parts = {rank: one.part for rank, one in enumerate(found) if one.part}
        problems = [one.problem for one in found if one.problem]
        if problems:
            self._session.note(f"step {self._step} was left in arenas, and could not be written ({problems[0]}): "
                               "training begins with the newest checkpoint")  # fmt: skip
        return not problems

    def _put(self, image: Image) -> bytes:
        slices = slices_of(image)
        for name in passed_on(image, {image.shard.folder} if image.content is not None else ()):
            self._exchange.put(self._step, name, slices[name])
        return b""

    def _file(self, image: Image, random: dict[int, bytes]) -> bytes:
        if image.content is None or not self._first_holder():
            return b""
        self._staged = staged = Staged(
            checkpoint_path(self._config.directory, self._step), LAYOUT, sha256=self._config.sha256
        )
        write_file(image, slices_of(image), {rank: data for rank, data in random.items() if data}, staged,
                   lambda name: self._exchange.take(self._step, name, lambda: False))  # fmt: skip
        return part_of(staged)

    def _first_holder(self) -> bool:
        rank = self._place.rank
        return any(group[0] == rank for group in self._place.replicas)

    def _published(self) -> bytes:
        place, staged, parts = self._place, self._staged, self._parts
        if not parts:
            raise CheckpointError("no rank has written a file")
        if staged is None or place.rank != min(parts):
            return b""
        saved = SavedPart(step=self._step, staged=staged, nbytes=staged.nbytes, part=parts[place.rank])
        writer, target = writer_of(place, self._number), staged.target
        saved.publish(parts, writer.provenance(self._step, "gasp", writer.newest_beside(target, LAYOUT)))
        write_tracker(self._config.directory, self._step)
        self._exchange.close(self._step)
        prune(self._config, LAYOUT, target, place)
        return b""
