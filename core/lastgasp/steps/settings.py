"""The settings of the step marks of one job. Argument beats environment beats default."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lastgasp.config import integer, pick
from lastgasp.errors import ConfigError

from . import bits

DEFAULT_LIMIT_MB = 5000
"""TaskD's own default of `upper_limit_of_disk_in_mb` (docs/facts/taskd.md §1)."""


@dataclass(frozen=True, kw_only=True)
class MarksConfig:
    """What is marked, and where the files go; build it with `MarksConfig.resolve`.

    Attributes:
        mask: the marks that are on at the start (`bits`); None where nothing is marked at all, and nothing can be
            switched on later.
        directory: the base of the profiling files; None takes MindCluster's, or one beside the checkpoints.
        limit_mb: MB that the profiling files of all jobs under the base may take; beyond it the oldest go.
    """

    mask: int | None = bits.DEFAULT_ON
    directory: Path | None = None
    limit_mb: int = DEFAULT_LIMIT_MB

    @classmethod
    def resolve(
        cls,
        marks: bool | str | None = None,
        profiling_dir: str | os.PathLike[str] | None = None,
        profiling_limit_mb: int | None = None,
    ) -> MarksConfig:
        """Merge arguments (None means not given), `LASTGASP_*` and defaults, and check every value.

        Raises:
            ConfigError: a value outside what is allowed.
        """
        env = os.environ
        mask = pick("marks", marks, env, _mask)
        folder = pick("profiling_dir", profiling_dir, env, _folder)
        limit = pick("profiling_limit_mb", profiling_limit_mb, env, _limit)
        return cls(
            mask=bits.DEFAULT_ON if mask is None else mask[0],
            directory=folder,
            limit_mb=DEFAULT_LIMIT_MB if limit is None else limit,
        )


_WHOLE: dict[object, int | None] = {
    True: bits.DEFAULT_ON,
    False: None,
    "1": bits.DEFAULT_ON,
    "0": None,
    "true": bits.DEFAULT_ON,
    "false": None,
    "none": 0,
    "all": bits.ALL,
}


def _mask(field: str, value: object) -> tuple[int | None]:
    if isinstance(value, bool | str) and value in _WHOLE:
        return (_WHOLE[value],)
    names = value.replace(",", " ").split() if isinstance(value, str) else []
    if not names or not set(names) <= set(bits.SHORT):
        allowed = f"True, False, 'all', 'none', or names out of {', '.join(bits.SHORT)}"
        remedy = "'none' marks nothing until it is switched on; False cannot be switched on."
        raise ConfigError(field, value, allowed, remedy)
    return (bits.mask_of(names),)


def _folder(field: str, value: object) -> Path:
    try:
        if not isinstance(value, str | os.PathLike) or str(value) == "" or "\0" in str(value):
            raise ValueError(value)
        return Path(value).expanduser().absolute()
    except (ValueError, RuntimeError):
        raise ConfigError(field, value, "a directory path", "Leave it out to have it chosen.") from None


def _limit(field: str, value: object) -> int:
    return integer(field, value, 0, "Leave it out for 5000 MB.")
