"""What `recovery` is where nobody has said it."""

from __future__ import annotations

import pytest

from lastgasp.adapter import ConfigError, asked_recovery, recovery_here


@pytest.fixture(autouse=True)
def under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LASTGASP_RECOVERY", "LASTGASP_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LASTGASP_LAUNCHER", "run")


@pytest.mark.parametrize(
    ("device", "groups", "found"),
    [
        ("cpu", "gloo", "auto"),
        ("cpu", "cpu:gloo", "auto"),
        ("cpu", "cpu:gloo,cuda:nccl", "restart"),
        ("cpu", "mpi", "restart"),
        ("cpu", "", "restart"),
        ("cuda:0", "nccl", "restart"),
        ("cuda:0", "gloo", "restart"),
        ("npu:3", "hccl", "restart"),
        ("npu:3", "gloo", "restart"),
    ],
)
def test_the_default_is_auto_where_that_was_proven(device: str, groups: str, found: str) -> None:
    assert recovery_here(None, device, groups) == found
    assert recovery_here("retry", device, groups) == "retry"


def test_without_a_launcher_nothing_can_be_entered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LASTGASP_LAUNCHER")
    assert recovery_here(None, "cpu", "gloo") == "restart"


def test_argument_beats_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_recovery(None) is None
    monkeypatch.setenv("LASTGASP_RECOVERY", "save")
    assert (asked_recovery(None), asked_recovery("auto")) == ("save", "auto")
    with pytest.raises(ConfigError, match="auto, retry, replace, restart, save"):
        asked_recovery("sometimes")
