"""The settings of one job: MindFormers' YAML, the callback's arguments, `LASTGASP_*`, defaults; and if it is on."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lastgasp.adapter import ConfigError, GaspConfig, MarksConfig, flag, integer, pick

ENV_ON = "LASTGASP"
SECTION = "lastgasp"
"""The section of MindFormers' YAML."""
CALLBACK = "LastGasp"
"""The `type` of the entry in `callbacks:` that turns it on as well."""
DEFAULT_ATTEMPTS = 5
"""As many as the documentation's sample restarts have."""
_GASP = ("keep", "resume", "hang_timeout", "save_timeout", "finish_timeout", "sha256")
_MARKS = ("marks", "profiling_dir", "profiling_limit_mb")
NAMES = ("dir", *_GASP, *_MARKS, "require_manifest", "attempts")
"""What may be set."""
_SWITCH = {"1": True, "0": False, "": None}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for.

    Attributes:
        gasp: the engine's configuration.
        marks: what is marked in each step, and where that goes.
        require_manifest: whether checkpoints without a manifest are refused.
        attempts: how many checkpoints a reload tries, newest first, before it refuses.
    """

    gasp: GaspConfig
    marks: MarksConfig = field(default_factory=MarksConfig)
    require_manifest: bool = False
    attempts: int = DEFAULT_ATTEMPTS


def options_of(directory: str | os.PathLike[str] | None = None, **given: Any) -> Options:
    """Merge arguments (None means not given), `LASTGASP_*` and defaults, and check every value.

    Args:
        directory: where checkpoints and incidents stand.
        given: any of `NAMES` but `dir`.

    Raises:
        ConfigError: a value outside what is allowed, an unknown name, or no directory.
    """
    unknown = sorted(set(given) - set(NAMES))
    if unknown:
        raise ConfigError(unknown[0], given[unknown[0]], f"one of {sorted(NAMES)}", "Check the spelling.")
    env = os.environ
    required = pick("require_manifest", given.get("require_manifest"), env, flag)
    attempts = pick("attempts", given.get("attempts"), env, _attempts)
    return Options(
        gasp=GaspConfig.resolve(directory, **{name: given.get(name) for name in _GASP}),
        marks=MarksConfig.resolve(**{name: given.get(name) for name in _MARKS}),
        require_manifest=bool(required),
        attempts=attempts or DEFAULT_ATTEMPTS,
    )


def switched() -> bool | None:
    """What `LASTGASP` says: on, off, or None where it says nothing.

    Raises:
        ConfigError: it is neither 1 nor 0.
    """
    value = os.environ.get(ENV_ON, "")
    if value not in _SWITCH:
        raise ConfigError(ENV_ON, value, "1 (on) or 0 (off)", "Set it to 1, or unset it.")
    return _SWITCH[value]


def options_of_config(config: Any) -> Options | None:
    """What MindFormers' configuration asks for; None where lastgasp is off.

    On are `lastgasp: {enable: True}`, an entry `type: LastGasp` in `callbacks:`, or `LASTGASP=1`. `LASTGASP=0` beats
    them all. The directory is, in this order: `dir` of the section or of the entry, LASTGASP_DIR, `output_dir`.

    Args:
        config: a MindFormerConfig or another mapping.

    Raises:
        ConfigError: a key or a value that is not allowed.
    """
    section = _section(config.get(SECTION))
    enabled = section.pop("enable", None)
    if enabled is not None and not isinstance(enabled, bool):
        raise ConfigError(f"{SECTION}.enable", enabled, "True or False", "Fix it in the YAML.")
    entry = callback_entry(config)
    wanted = switched()
    if wanted is None:
        wanted = enabled if enabled is not None else entry is not None
    if not wanted:
        return None
    given = {**{k: v for k, v in (entry or {}).items() if k not in ("type", "auto_register")}, **section}
    _known(given)
    directory = given.pop("dir", None) or os.environ.get("LASTGASP_DIR") or _output(config)
    return options_of(directory, **given)


def callback_entry(config: Any) -> MutableMapping[str, Any] | None:
    """The entry `type: LastGasp` of `callbacks:`; None where there is none."""
    entries = config.get("callbacks") or []
    entries = entries if isinstance(entries, list | tuple) else [entries]
    found = (entry for entry in entries if isinstance(entry, MutableMapping) and entry.get("type") == CALLBACK)
    return next(found, None)


def _section(value: object) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        remedy = f"Write `{SECTION}: {{enable: True, dir: ...}}` in the YAML."
        raise ConfigError(SECTION, value, "a mapping with `enable`", remedy)
    return dict(value)


def _known(given: Mapping[str, Any]) -> None:
    for name in sorted(set(given) - set(NAMES)):
        allowed = f"one of {sorted(('enable', *NAMES))}"
        raise ConfigError(f"{SECTION}.{name}", given[name], allowed, "Check the spelling in the YAML.")


def _output(config: Any) -> Path:
    """MindFormers' own output directory, `./output` where the YAML names none."""
    return Path(config.get("output_dir") or "./output")


def _attempts(name: str, value: object) -> int:
    return integer(name, value, 1, "Use 1 to try only the newest checkpoint.")
