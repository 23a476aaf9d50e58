"""How a Session gets its marks: the recorder of this rank, or marks that do nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lastgasp import _clock
from lastgasp.topology import Place

from .places import profiling_base, task_id
from .recorder import DeviceRows, RecorderOptions, StepRecorder
from .settings import MarksConfig


@dataclass(frozen=True, kw_only=True)
class Marking:
    """An adapter's settings for the marks of its rank.

    Attributes:
        config: the user's settings.
        framework: for readers of the files, such as "lightning 2.6.6".
        device: number of this rank's device on its host, its local rank.
    """

    config: MarksConfig = field(default_factory=MarksConfig)
    framework: str = ""
    device: int = 0


class Recorder(Protocol):
    """The marks of one rank, recorded by the engine (`StepRecorder`) or by mstx.

    The Session opens it, hands it to the adapter, and closes it once; it never raises into training.
    """

    marks: Any
    """The marks that training uses (`Marks`)."""

    def set_groups(self, groups: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the process groups, for parallel_group.json."""

    def set_device_rows(self, source: DeviceRows) -> None:
        """Record where the times of the device rows come from, for readers."""

    def flush(self, timeout: float) -> bool:
        """Write what was marked to disk, within `timeout` seconds; True once it is there."""

    def close(self, timeout: float = ...) -> bool:
        """Switch the marks off for good; True once everything is on disk. Idempotent."""


class NoMark:
    """Replaces every mark if nothing is marked."""

    value = 0

    def __enter__(self) -> None: ...
    def __exit__(self, *exc: object) -> None: ...

    def begin(self) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""

    def cancel(self) -> bool:
        """Nothing was open."""
        return False


_NOTHING = NoMark()


def no_mark(name: str) -> NoMark:
    """Stands for `Marks.mark`."""
    return _NOTHING


def no_step(number: int) -> None:
    """Replaces `Marks.step`."""


def open_recorder(marking: Marking | None, place: Place, started_s: int | None, run: Path) -> StepRecorder | None:
    """The recorder of this rank; None if nothing is to be marked.

    Args:
        started_s: when the job's controller started, unix seconds; None without one.
        run: the job's directory, which holds the profiling files unless another place is configured.

    Raises:
        ConfigError: the profiling directory is longer than a path can be.
    """
    config = MarksConfig(mask=None) if marking is None else marking.config
    if marking is None or config.mask is None:
        return None
    options = RecorderOptions(
        rank=place.rank,
        world_size=place.world_size,
        base=config.directory or profiling_base(run, place.rank),
        task=task_id(_started(place) if started_s is None else started_s),
        mask=config.mask,
        limit_mb=config.limit_mb,
        framework=marking.framework,
        device=marking.device,
    )
    return StepRecorder.open(options)


def _started(place: Place) -> str:
    """To the nanosecond: many runs of one rank may begin in one second and write below one directory."""
    return "{}_{:09}".format(*divmod(place.began_ns or _clock.wall_ns(), 1_000_000_000))
