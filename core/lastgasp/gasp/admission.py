"""Whether a rank may join: only the current attempt, and the incarnation that was agreed on."""

from __future__ import annotations

from lastgasp import __version__
from lastgasp.errors import AuthenticationError, ControlError, VersionMismatch

from . import messages as m
from .attempt import Attempt
from .secret import WRONG_TOKEN


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
        NotYet: its next training has other settings, and the others are still in the one that it has ended.
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
    if current is not None and not is_newer(hello, current) and (why := current.disagreement(hello)):
        raise NotYet(m.NOT_YET) if current.was_ended_by(hello.rank) else WholeJobRefused(why)


def order_of(hello: m.Hello) -> tuple[int, int]:
    """Attempts by number, and within one its incarnations."""
    return hello.attempt, hello.incarnation


def is_newer(hello: m.Hello, current: Attempt | None) -> bool:
    """A rank of another attempt or incarnation than the current one begins it.

    So does the first one that enters a training of the script with other settings, when all have ended the one before.
    """
    if current is None or order_of(hello) > order_of(current.hello):
        return True
    return order_of(hello) == order_of(current.hello) and current.was_ended() and bool(current.disagreement(hello))


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
