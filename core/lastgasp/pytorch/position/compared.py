"""Which batches of a pass are compared where it is drawn again: the first, second, fourth, eighth and so on.

So few cost nothing in a long pass, and what differs from some batch on is seen once twice as many have been drawn.
"""

from __future__ import annotations

from typing import Protocol


class Digests(Protocol):
    """Of the batches of a pass.

    Attributes:
        digest: of the first one; empty where it is not known.
        digests: of the second, fourth, eighth and so on.
    """

    digest: bytes
    digests: list[bytes]


def is_compared(number: int) -> bool:
    """Whether the batch of this number in its pass, from 1, is one of them."""
    return not number & (number - 1)


def compared(known: Digests, digest: bytes, number: int) -> bool | None:
    """Compare a batch with what is known, or remember it.

    Args:
        number: as in `is_compared`, which must be true of it.

    Returns:
        Whether it is the same; None where nothing was known of it.
    """
    at = number.bit_length() - 2
    before = known.digest if at < 0 else known.digests[at] if at < len(known.digests) else b""
    if before:
        return digest == before
    if at < 0:
        known.digest = digest
    else:
        known.digests += [b""] * (at + 1 - len(known.digests))
        known.digests[at] = digest
    return None


def those_of(digests: list[bytes], consumed: int) -> list[bytes]:
    """The `digests` of batches that were trained on, and not only drawn ahead."""
    return digests[: max(consumed.bit_length() - 1, 0)]
