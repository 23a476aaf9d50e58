"""The end of a run: each step happens, whatever one of them raises."""

from __future__ import annotations

import pytest

from lastgasp.undoing import run_all


def test_a_step_that_raises_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []

    def take_out_a_hook() -> None:
        raise AttributeError("somebody else has taken it out")

    run_all([lambda: done.append("before"), take_out_a_hook, lambda: done.append("session closed")])
    assert done == ["before", "session closed"]
    assert "take_out_a_hook" in caplog.text and "somebody else has taken it out" in caplog.text


def test_an_interrupt_is_not_swallowed() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all([stop])
