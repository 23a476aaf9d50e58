"""What MindFormers' YAML asks for, and whether lastgasp is on."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from lastgasp.adapter import OPTION_NAMES, ConfigError, Options, switched

log = logging.getLogger("lastgasp")

SECTION = "lastgasp"
"""The section of MindFormers' YAML."""
CALLBACK = "LastGasp"
"""The `type` of the entry in `callbacks:` that turns it on as well."""
_NAMES = ("dir", *OPTION_NAMES)
_NOT_IN_PLACE = (
    "recovery=%s: a step of MindSpore's is one graph, which nothing in its process can leave. After a fault it is "
    "saved, and the job restarts"
)


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
    return Options.resolve(directory, **given)


def answered_by(recovery: str | None, rank: int) -> str:
    """What `recovery` leaves of the ways to answer a fault here (`RankStatus.recovery`): a restart, or none."""
    if recovery not in (None, "restart", "save") and rank == 0:
        log.warning(_NOT_IN_PLACE, recovery)
    return recovery if recovery in ("restart", "save") else ""


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
    for name in sorted(set(given) - set(_NAMES)):
        allowed = f"one of {sorted(('enable', *_NAMES))}"
        raise ConfigError(f"{SECTION}.{name}", given[name], allowed, "Check the spelling in the YAML.")


def _output(config: Any) -> Path:
    """MindFormers' own output directory, `./output` where the YAML names none."""
    return Path(config.get("output_dir") or "./output")
