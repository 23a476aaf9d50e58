"""The stand-in for a training on a device that can be stopped: its thread leaves a collective that never ends."""

from __future__ import annotations

import pytest

from support.mindio import replicated


class Lost:
    """What gloo makes of a collective that it began while its connections were cut."""

    def is_completed(self) -> bool:
        """It never is."""
        return False

    def wait(self) -> None:
        """Half an hour."""
        pytest.fail("it waits for what never comes")


def test_a_collective_that_never_ends_is_left_once_the_device_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicated, "RAISES", 0.01)
    replicated.STOPPED.set()
    try:
        with pytest.raises(RuntimeError, match="FORCE STOP"):
            replicated.finish(Lost())
    finally:
        replicated.STOPPED.clear()
