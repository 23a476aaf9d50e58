"""The error tree. Every message says what was wrong, what is allowed, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

_SINGLE = 3
"""Greatest number of checkpoints with the same fault that are listed one by one."""


class LastgaspError(Exception):
    """Base of every error that lastgasp raises on purpose.

    Attributes:
        restart_helps: whether another try may succeed; if not, a launcher stops.
    """

    restart_helps: ClassVar[bool] = True

    def __reduce__(self) -> tuple[object, ...]:
        """As it is: Ray and pools of processes send it, and `__init__` takes other arguments than the message."""
        return _as_it_was, (type(self), self.args), vars(self)


def _as_it_was(kind: type[LastgaspError], args: tuple[object, ...]) -> LastgaspError:
    error = kind.__new__(kind)
    error.args = args
    return error


class ConfigError(LastgaspError, ValueError):
    """A wrong value, refused at construction or at start.

    Args:
        field: name of the argument, environment variable or file key.
        value: what was given.
        allowed: what is accepted.
        remedy: what to do now.
    """

    restart_helps = False

    def __init__(self, field: str, value: object, allowed: str, remedy: str) -> None:
        self.field, self.value, self.allowed, self.remedy = field, value, allowed, remedy
        super().__init__(f"{field}={value!r} is not allowed: expected {allowed}. {remedy}")


class MissingExtra(LastgaspError, ImportError):
    """A framework or optional library is not installed; names the extra that installs it."""

    restart_helps = False

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(f"{module} is not installed. In lastgasp's checkout: pip install -e '.[{extra}]'")


class CheckpointError(LastgaspError):
    """Base of errors about a checkpoint on disk."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint requested by name does not verify.

    Args:
        path: the checkpoint.
        reasons: one line per damage, each naming file and byte range.
        remedy: what to do now.
    """

    restart_helps = False

    def __init__(
        self,
        path: str,
        reasons: list[str],
        remedy: str = "Give another checkpoint, or resume='auto' to take the newest good one.",
    ) -> None:
        self.path, self.reasons = path, reasons
        listing = "\n  ".join(reasons)
        super().__init__(f"checkpoint {path} is damaged and was not loaded:\n  {listing}\n{remedy}")


def grouped(reasons: Mapping[str, str], verb: str = "") -> list[str]:
    """Format one line per checkpoint and why it was refused; one line for many with the same reason.

    Args:
        reasons: path -> why.
        verb: the text between the two, such as " was not used".
    """
    by_reason: dict[str, list[str]] = {}
    for path, why in reasons.items():
        by_reason.setdefault(why, []).append(path)
    lines = []
    for why, paths in by_reason.items():
        many = len(paths) > _SINGLE
        lines += [f"{len(paths)} checkpoints, {paths[0]} to {paths[-1]}{verb}: {why}"] if many else []
        lines += [] if many else [f"{path}{verb}: {why}" for path in paths]
    if any("no manifest" in why for why in by_reason):
        lines.append("`lastgasp manifest DIR` gives complete checkpoints that were written without lastgasp a manifest")
    return lines


class NoGoodCheckpoint(CheckpointError):
    """Checkpoints exist, none of them verifies; starting from scratch would lose them silently.

    Args:
        directory: where they are; reasons: path -> why it was refused.
        remedy: what to do now.
    """

    restart_helps = False

    def __init__(
        self,
        directory: str,
        reasons: dict[str, str],
        remedy: str = "Refusing to start from scratch over them. Restore one of them, give resume=<path> to load one "
        "that you trust, or give resume='never' to start anew.",
    ) -> None:
        self.directory, self.reasons = directory, reasons
        listing = "\n  ".join(grouped(reasons))
        super().__init__(
            f"no checkpoint in {directory} can be trusted, and there are {len(reasons)}:\n  {listing}\n{remedy}"
        )


class NothingLoads(CheckpointError):
    """Checkpoints verify, and the framework can load none of them; nothing was moved.

    Args:
        directory: where they are; reasons: path -> why it does not load.
    """

    restart_helps = False

    def __init__(self, directory: str, reasons: dict[str, str]) -> None:
        self.directory, self.reasons = directory, reasons
        listing = "\n  ".join(f"{path.removeprefix(f'{directory}/')}: {why}" for path, why in reasons.items())
        super().__init__(
            f"no checkpoint in {directory} loads, and {len(reasons)} of them verify; nothing was moved:\n  {listing}\n"
            "Were the model, the optimizer or the parallel sizes changed? Change them back, give another directory, or "
            "give resume='never' to start anew."
        )


class CheckpointMismatch(CheckpointError):
    """A good checkpoint of another model, optimizer or loop than the one that is to resume from it.

    Args:
        path: the checkpoint.
        differences: one line each.
    """

    restart_helps = False

    def __init__(self, path: str, differences: list[str]) -> None:
        self.path, self.differences = path, differences
        listing = "\n  ".join(differences)
        super().__init__(
            f"checkpoint {path} does not fit this training, and nothing was loaded:\n  {listing}\n"
            "Give the state that was saved, another dir, resume='never' to start anew, or resume=<path> to load it "
            "as it is."
        )


class UsageError(LastgaspError, RuntimeError):
    """A call that is not allowed in this state; says what was expected."""


class ControlError(LastgaspError):
    """Base of errors of the control connection between a rank and the controller."""


class AuthenticationError(ControlError):
    """The other side does not know the job's token."""


class ProtocolError(ControlError):
    """Bytes that do not form a valid message, or a message out of order."""


class VersionMismatch(ControlError):
    """Two ranks of one job run different versions of lastgasp."""

    restart_helps = False


class DeadlineExceeded(LastgaspError, TimeoutError):
    """A bounded wait timed out.

    Args:
        what: what was waited for.
        seconds: how long.
        remedy: what to check or to increase.
    """

    def __init__(self, what: str, seconds: float, remedy: str) -> None:
        self.what, self.seconds = what, seconds
        super().__init__(f"waited {seconds:g} s for {what}. {remedy}")


class NotSaveable(LastgaspError):
    """The state of this rank cannot be written as a consistent step."""


class Moved(NotSaveable):
    """The state advanced to a later step while it was being saved; that step may be saved instead."""
