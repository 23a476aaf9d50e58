"""Numbers as people read them."""

from __future__ import annotations


def ms(seconds: float) -> str:
    """A duration with a unit that fits: `12.3 ms`, `4.56 s`, `0.8 ms`."""
    value = abs(seconds)
    if value >= 100:
        return f"{seconds:.0f} s"
    if value >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.{0 if value >= 0.1 else 1 if value >= 0.001 else 2}f} ms"


def percent(share: float) -> str:
    """`12 %`; `0.4 %` where it is little."""
    return f"{share * 100:.{0 if share >= 0.1 or share == 0 else 1}f} %"
