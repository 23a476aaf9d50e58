"""Who serves the ranks outlives the signals that are for them; a rank that is forked from it does not."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from lastgasp import user_signals


@pytest.fixture
def as_ever() -> Iterator[None]:
    """What pytest has, afterwards, too."""
    before = {number: signal.getsignal(number) for number in user_signals.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("as_ever")
def test_they_are_outlived_and_restored() -> None:
    own, ignored = user_signals.SIGNALS
    signal.signal(own, signal.SIG_DFL)
    signal.signal(ignored, signal.SIG_IGN)
    user_signals.outlive()
    signal.raise_signal(own)
    assert signal.getsignal(ignored) is signal.SIG_IGN  # somebody has decided
    user_signals.restore()
    assert (signal.getsignal(own), signal.getsignal(ignored)) == (signal.SIG_DFL, signal.SIG_IGN)
