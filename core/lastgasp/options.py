"""What the user of a framework asked for: the settings of its adapter. Argument beats environment beats default."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields

from lastgasp.arena_filling import ArenaMode
from lastgasp.config import GaspConfig, Recovery, arena_of, asked_recovery, flag, integer, pick
from lastgasp.errors import ConfigError
from lastgasp.steps.settings import MarksConfig

DEFAULT_ATTEMPTS = 5
"""As many as the sample restarts in MindFormers' documentation have."""
_GASP = tuple(each.name for each in fields(GaspConfig) if each.name != "directory")
_MARKS = ("marks", "profiling_dir", "profiling_limit_mb")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Build them with `Options.resolve`.

    Attributes:
        gasp: the engine's configuration.
        marks: what is marked in each step, and where that goes.
        require_manifest: whether checkpoints without a manifest are refused.
        attempts: how many checkpoints a reload tries, newest first, before it refuses.
        recovery: how a fault may be answered; None where nobody has said it.
        arena: which steps are copied into arenas, where ranks have them.
    """

    gasp: GaspConfig
    marks: MarksConfig = field(default_factory=MarksConfig)
    require_manifest: bool = False
    attempts: int = DEFAULT_ATTEMPTS
    recovery: Recovery | None = None
    arena: ArenaMode = "auto"

    @classmethod
    def resolve(cls, directory: str | os.PathLike[str] | None = None, **given: object) -> Options:
        """Merge arguments (None means not given), `LASTGASP_*` and defaults, and check every value.

        Args:
            directory: where checkpoints and incidents go; given: any of `NAMES`.

        Raises:
            ConfigError: a value that is not allowed, an unknown name, or no directory.
        """
        for name in sorted(set(given) - set(NAMES)):
            raise ConfigError(name, given[name], f"one of {sorted(NAMES)}", "Check the spelling.")
        required = pick("require_manifest", given.get("require_manifest"), os.environ, flag)
        attempts = pick("attempts", given.get("attempts"), os.environ, _attempts)
        marks: dict[str, object] = {name: given.get(name) for name in _MARKS}
        return cls(
            gasp=GaspConfig.resolve(directory, **{name: given.get(name) for name in _GASP}),
            marks=MarksConfig.resolve(**marks),  # type: ignore[arg-type]  # it checks them
            require_manifest=bool(required),
            attempts=attempts or DEFAULT_ATTEMPTS,
            recovery=asked_recovery(given.get("recovery")),
            arena=arena_of(given.get("arena")),
        )


NAMES = (*_GASP, *_MARKS, "require_manifest", "attempts", "recovery", "arena")
"""What may be set besides the directory."""


def switched() -> bool | None:
    """What the environment variable LASTGASP says: on, off, or None where it says nothing.

    Raises:
        ConfigError: it is neither 1 nor 0.
    """
    value = os.environ.get("LASTGASP", "")
    if value not in ("1", "0", ""):
        raise ConfigError("LASTGASP", value, "1 (on) or 0 (off)", "Set it to 1, or unset it.")
    return value == "1" if value else None


def _attempts(name: str, value: object) -> int:
    return integer(name, value, 1, "Use 1 to try only the newest checkpoint.")
