"""Whether a rank may join: only the current attempt, and the incarnation that was agreed on."""

from __future__ import annotations

from . import messages as m
from .attempt import Attempt


def order_of(hello: m.Hello) -> tuple[int, int]:
    """Attempts by number, and within one its incarnations."""
    return hello.attempt, hello.incarnation


def is_newer(hello: m.Hello, current: Attempt | None) -> bool:
    """A rank of another attempt or incarnation than the current one begins it."""
    return current is None or order_of(hello) > order_of(current.hello)


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
