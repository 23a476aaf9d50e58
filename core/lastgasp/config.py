"""The frozen configuration of one job. Argument beats environment beats default."""

from __future__ import annotations

import difflib
import errno
import inspect
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

from . import logs
from ._fs import fsync_dir, unique_temp
from .errors import ConfigError

T = TypeVar("T")
log = logging.getLogger("lastgasp")
HangTimeout = float | Literal["auto"]
Recovery = Literal["auto", "retry", "replace", "restart", "save"]
"""How a fault may be answered in place where the training can be entered again: retry replaces no rank, replace does no
step again for an exception, restart does neither."""


@dataclass(frozen=True, kw_only=True)
class GaspConfig:
    """The engine's settings; build them with `GaspConfig.resolve`.

    Attributes:
        directory: for checkpoints and incidents; the same path on every rank.
        keep: how many gasp checkpoints to keep; older ones are removed after a newer one was verified.
        resume: "auto" loads the newest good checkpoint, "never" ignores those from before this job, a path loads
            that checkpoint.
        hang_timeout: seconds without any progress until ranks count as hung; "auto" learns it
            (10 times the longest gap seen, at least 60 s).
        save_timeout: seconds a gasp's save may take before another holder is tried.
        finish_timeout: seconds for a rank that is inside its update to finish it.
        sha256: also write SHA-256 digests (for signatures; about ten times slower than xxh3).
    """

    directory: Path
    keep: int = 3
    resume: str = "auto"
    hang_timeout: HangTimeout = "auto"
    save_timeout: float = 600.0
    finish_timeout: float = 10.0
    sha256: bool = False

    @classmethod
    def resolve(cls, directory: str | os.PathLike[str] | None = None, **given: object) -> GaspConfig:
        """Merge arguments (None means not given), `LASTGASP_*` and defaults, and check every value.

        Raises:
            ConfigError: a value is not allowed, or an argument is unknown.
        """
        env = os.environ
        unknown = set(given) - set(_FIELDS)
        if unknown:
            name = min(unknown)
            raise ConfigError(name, given[name], f"one of {sorted(_FIELDS)}", "Check the spelling.")
        values: dict[str, Any] = {name: pick(name, given.get(name), env, check) for name, check in _FIELDS.items()}
        return cls(directory=_directory(directory, env), **{k: v for k, v in values.items() if v is not None})


_ADDRESS = re.compile(r"[A-Za-z][\w+.-]+:/")
"""s3://bucket/x, also as pathlib has it (s3:/bucket/x). As a path it is a directory `s3:` in the working directory."""


def _directory(directory: str | os.PathLike[str] | None, env: Mapping[str, str]) -> Path:
    value = directory if directory is not None else env.get("LASTGASP_DIR")
    if isinstance(value, str | os.PathLike) and _ADDRESS.match(str(value)):
        remedy = "Mount it and give the mount point, or train into a local directory and copy it there."
        raise ConfigError("dir", str(value), "a directory of a mounted file system, not an address", remedy)
    try:
        if not isinstance(value, str | os.PathLike) or str(value) == "" or "\0" in str(value):
            raise ValueError(value)
        path = Path(value).expanduser().absolute()
        str(path).encode()  # it travels in messages and records
        os.fsencode(path)
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        remedy = ("Start Python with PYTHONUTF8=1 or in a UTF-8 locale (LC_ALL=C.UTF-8)." if encoding != "utf-8" else
                  "Use a path whose bytes are valid UTF-8.")  # fmt: skip
        allowed = f"a path that Python can read here, where it takes paths for {encoding}"
        raise ConfigError("dir", str(value), allowed, remedy) from None
    except (ValueError, RuntimeError):  # RuntimeError: ~somebody who does not exist
        raise ConfigError("dir", value, "a directory path", "Give dir=... or set LASTGASP_DIR.") from None
    return path


def pick(name: str, value: object, env: Mapping[str, str], check: Callable[[str, object], T]) -> T | None:
    """Return `value` if given, else the environment's value, else None; checked.

    Raises:
        ConfigError: by `check`, naming the argument or the variable.
    """
    variable = f"LASTGASP_{name.upper()}"
    if value is not None:
        return check(name, value)
    if env.get(variable):
        return check(variable, env[variable])
    return None


def _positive_int(field: str, value: object) -> int:
    return integer(field, value, 1, "Use 1 to keep only the newest.")


def integer(field: str, value: object, least: int, remedy: str) -> int:
    """Return `value` as an integer of at least `least`.

    Raises:
        ConfigError: it is not one.
    """
    allowed = f"an integer of at least {least}"
    number = _number(field, value, allowed, remedy)
    if number != int(number) or number < least or isinstance(value, bool):
        raise ConfigError(field, value, allowed, remedy)
    return int(number)


def _number(field: str, value: object, allowed: str, remedy: str) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(field, value, allowed, remedy) from None
    if not math.isfinite(number):
        raise ConfigError(field, value, allowed, remedy)
    return number


def _seconds(field: str, value: object) -> float:
    allowed = "a positive number of seconds"
    number = _number(field, value, allowed, "Leave it out to use the default.")
    if number <= 0 or isinstance(value, bool):
        raise ConfigError(field, value, allowed, "Leave it out to use the default.")
    return number


def _hang(field: str, value: object) -> HangTimeout:
    if value == "auto":
        return "auto"
    remedy = "Use 'auto' to learn it from the run."
    number = _number(field, value, "'auto' or a positive number of seconds", remedy)
    if number <= 0 or isinstance(value, bool):
        raise ConfigError(field, value, "'auto' or a positive number of seconds", remedy)
    return number


def _resume(field: str, value: object) -> str:
    if not isinstance(value, str | os.PathLike) or str(value) == "":
        raise ConfigError(field, value, "'auto', 'never' or a checkpoint's path", "Use 'auto'.")
    return os.fspath(value)


def asked_recovery(given: object) -> Recovery | None:
    """The argument `recovery`, else `LASTGASP_RECOVERY`; None where nobody has said it.

    Raises:
        ConfigError: another value.
    """
    return pick("recovery", given, os.environ, _recovery)


def recovery_of(given: object, default: Recovery = "auto") -> Recovery:
    """As `asked_recovery`, else `default`.

    Raises:
        ConfigError: another value.
    """
    return asked_recovery(given) or default


def _recovery(field: str, value: object) -> Recovery:
    for allowed in get_args(Recovery):
        if value == allowed:
            return cast(Recovery, allowed)
    raise ConfigError(field, value, f"one of {', '.join(get_args(Recovery))}", "Leave it out for the default.")


def arena_of(given: object) -> int | Literal["auto"]:
    """The argument `arena`, else `LASTGASP_ARENA`, else "auto"; steps between two copies, 0 for none.

    Raises:
        ConfigError: it is none of "auto", "off", "every N".
    """
    found = pick("arena", given, os.environ, _arena)
    return "auto" if found is None else found


def buddy_of() -> int | Literal["auto"]:
    """`LASTGASP_BUDDY`, else off: which of the copied steps go to a partner host, as in `arena_of`.

    Raises:
        ConfigError: it is none of "auto", "off", "every N".
    """
    found = pick("buddy", None, os.environ, _arena)
    return 0 if found is None else found


def _arena(field: str, value: object) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if value == "off":
        return 0
    word, _, number = str(value).partition(" ")
    if word == "every" and number.isascii() and number.isdigit() and int(number) > 0:
        return int(number)
    raise ConfigError(field, value, "'auto', 'off' or 'every N' with N of at least 1", "Leave it out for the default.")


def flag(field: str, value: object) -> bool:
    """The value as a switch. Raises ConfigError."""
    known = {True: True, False: False, "1": True, "0": False, "true": True, "false": False}
    if not isinstance(value, bool | str) or value not in known:
        raise ConfigError(field, value, "True or False (1 or 0 in the environment)", "Leave it out.")
    return known[value]


def env_flag(variable: str, env: Mapping[str, str] = os.environ) -> bool:
    """The switch `variable` of the environment; off where it is not set.

    Raises:
        ConfigError: another value.
    """
    return flag(variable, env.get(variable) or False)


_FIELDS: dict[str, Callable[[str, object], object]] = {
    "keep": _positive_int,
    "resume": _resume,
    "hang_timeout": _hang,
    "save_timeout": _seconds,
    "finish_timeout": _seconds,
    "sha256": flag,
}


def refuse_unknown(unknown: Mapping[str, object], function: Callable[..., Any]) -> None:
    """Refuse keyword arguments that `function` does not have.

    Raises:
        ConfigError: names the argument, the known ones, and the one probably meant.
    """
    known = [name for name, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for name, value in unknown.items():
        meant = difflib.get_close_matches(name, known, 1)
        remedy = f"Did you mean {meant[0]!r}?" if meant else "Check the spelling."
        raise ConfigError(name, value, f"one of the arguments {', '.join(known)}", remedy)


def attempt_in(env: Mapping[str, str]) -> int:
    """How often the launcher has restarted this job, by what it gives its ranks; 0 at first."""
    return int(env.get("LASTGASP_ATTEMPT") or env.get("TORCHELASTIC_RESTART_COUNT") or 0)


def check_writable(directory: Path) -> None:
    """Create `directory` if necessary and check that a file can be created in it.

    A restart trains on through an error that can pass, such as a full disk: refused, the job would be over for good.

    Raises:
        ConfigError: it is not writable; with the operating system's reason.
    """
    probe = unique_temp(directory / "probe")  # ranks of other hosts may have the same process id
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
        fsync_dir(directory)  # warns at the start if the file system cannot sync directories
    except OSError as error:
        if error.errno in _PASSING and attempt_in(os.environ) > 0:
            logs.set_up()
            if directory not in _SAID:  # asked more than once in a start
                log.warning("%s cannot be written (%s): the training goes on, and nothing can be saved until that is "
                            "over", directory, error.strerror)  # fmt: skip
            _SAID.add(directory)
            return
        raise ConfigError(
            "dir",
            str(directory),
            "a directory that this user can write",
            f"{error.strerror}: fix or move it.",
        ) from error
    _SAID.discard(directory)


_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
"""Errors of a file system that was good before and can be good again."""
_SAID: set[Path] = set()
"""Directories for which a warning was logged."""
