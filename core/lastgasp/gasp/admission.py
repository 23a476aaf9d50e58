"""Whether a rank may join: only the current attempt, and the incarnation that was agreed on."""

from __future__ import annotations

from lastgasp import __version__
from lastgasp.errors import AuthenticationError, ControlError, VersionMismatch

from . import messages as m
from .attempt import Attempt
from .ladder import Ladder
from .secret import WRONG_TOKEN

NOT_BY_ALL = (
    "an exception on rank {rank} ({cause}) has ended the training of all ranks, and not all have raised one: where a "
    "script handles what ends a training and begins another one, all of its ranks must; or it is handled inside of the "
    "training, where no other rank hears of it"
)


class WholeJobRefused(ControlError):
    """The job cannot train with this rank nor without it: what the others wait for fails as well."""


class NotYet(ControlError):
    """The rank asks too early, and may ask again."""


class OtherVersion(WholeJobRefused, VersionMismatch):
    """The rank has another version of lastgasp than the controller."""


def admit(hello: m.Hello, nonce: bytes, token: str, current: Attempt | None, expected: int | None) -> None:
    """Check that a rank may join. The token is checked first and never quoted in a message.

    Args:
        nonce: what the rank had to prove its token with.
        expected: as in `refusal`.

    Raises:
        AuthenticationError: it does not know the token.
        OtherVersion: it has another version of lastgasp.
        WholeJobRefused: it disagrees with the ranks that have joined.
        NotYet: its next training has other settings, or its script has handled what it raised, and the others are
            still in the training before.
        ControlError: it is of another attempt.
    """
    if not m.proven(token, "rank", nonce, hello.rank, hello.mac):
        raise AuthenticationError(WRONG_TOKEN)
    if hello.protocol != m.PROTOCOL or hello.version != __version__:
        raise OtherVersion(
            f"lastgasp version {hello.version} (protocol {hello.protocol}) on rank {hello.rank}, but {__version__} "
            f"(protocol {m.PROTOCOL}) in the controller: install the same version on every node"
        )
    if why := refusal(hello, current, expected):
        raise ControlError(why)
    if current is None or is_newer(hello, current):
        return
    if raised := raised_by(current, hello.rank):
        members = current.machine.members
        if any(one.gone and not one.left and not raised_by(current, rank) for rank, one in members.items()):
            raise WholeJobRefused(NOT_BY_ALL.format(rank=hello.rank, cause=raised))
        raise NotYet(m.NOT_YET)
    if why := current.disagreement(hello):
        raise NotYet(m.NOT_YET) if current.was_ended_by(hello.rank) else WholeJobRefused(why)


def raised_by(current: Attempt, rank: int) -> str:
    """What this rank has raised, if such exceptions alone have ended the training of all; else empty."""
    machine, member = current.machine, current.machine.members.get(rank)
    if machine.state != "over" or current.again is not None or not isinstance(machine, Ladder) or member is None:
        return ""
    alone = all(fault.kind in ("exception", "peer") for fault in machine.faults)
    return member.fault.cause if alone and member.fault is not None and member.fault.kind == "exception" else ""


def order_of(hello: m.Hello) -> tuple[int, int]:
    """Attempts by number, and within one its incarnations."""
    return hello.attempt, hello.incarnation


def is_newer(hello: m.Hello, current: Attempt | None) -> bool:
    """A rank of another attempt or incarnation than the current one begins it.

    So does the first one that enters a training of the script with other settings, when all have ended the one before;
    with any where all have, some by an exception that the script has handled.
    """
    if current is None or order_of(hello) > order_of(current.hello):
        return True
    if order_of(hello) != order_of(current.hello):
        return False
    if current.was_ended():
        return bool(current.disagreement(hello))
    return ended_by_all(current)


def ended_by_all(current: Attempt) -> bool:
    """Whether each rank has ended its training by itself: to its end, or by an exception of its own."""
    ranks = range(current.hello.world_size)
    return all(current.was_ended_by(rank) or raised_by(current, rank) for rank in ranks)


def refusal(hello: m.Hello, current: Attempt | None, expected: int | None) -> str:
    """Why a rank whose token is right is not let in; empty if it is, as far as its attempt is concerned.

    Args:
        expected: the attempt that the launcher counts.
    """
    if expected is not None and hello.attempt != expected:
        return f"attempt {hello.attempt} is not the one that runs: that is attempt {expected}"
    if current is not None and hello.attempt < current.hello.attempt:
        return f"attempt {hello.attempt} is over; attempt {current.hello.attempt} runs"
    same = current is not None and hello.attempt == current.hello.attempt
    if same and current is not None and hello.incarnation != current.hello.incarnation:
        again = current.again
        if again is None or hello.incarnation != again.incarnation:
            return f"incarnation {hello.incarnation} of attempt {hello.attempt} is not the one that runs"
    return "" if same or not hello.incarnation else f"incarnation {hello.incarnation} was not agreed on"
