"""A pause that MindX orders: all ranks wait between two steps, which is no hang, and train on by its word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lastgasp.testing.weights import differences
from support import mindx
from support.launchers import SUPPORT, incidents, running, torchrun, undisturbed_jobs, until
from support.recovery_backends import TORCH, used

WORKER = SUPPORT / "train_again.py"
GATE = 5
POD = {
    "HIGH_AVAILABILITY": "dump,retry", "LASTGASP_TOKEN": "the secret of this test's job",
    "LASTGASP_BIND": mindx.HOST, "LASTGASP_WARM": "off",
}  # fmt: skip

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Final weights of a job without a pause, by its number of ranks."""

    def alone(folder: Path, ranks: int) -> list[str]:
        return torchrun(WORKER, "--dir", folder, "--final", folder / "final.pt", ranks=ranks)

    return undisturbed_jobs(tmp_path_factory, alone)


@pytest.mark.parametrize(
    ("seconds", "goes_on"), [("600", True), pytest.param("1", False, marks=pytest.mark.full)], ids=["continue", "never"]
)
def test_ranks_wait_between_two_steps(
    seconds: str, goes_on: bool, tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where MindX does not say `continue` in time the step is dumped, and the job restarts: nothing is lost."""
    directory = tmp_path / "d"
    directory.mkdir()
    with used(TORCH, tmp_path, monkeypatch) as trace:
        command = mindx.command(WORKER, "--dir", directory, "--final", directory / "final.pt", ranks=2)
        with running(tmp_path, command, **POD, **{mindx.PAUSE: str(directory)}) as [started]:
            until(lambda: all((directory / f"gate-{rank}").exists() for rank in range(2)), "all are at the gate")
            (directory / "pause").write_text(seconds)
            until(lambda: len(trace.events("pause_known")) == 2, "both ranks know that they are to pause")
            (directory / "go").touch()
            until(lambda: len(trace.events("pauses")) == 2, "both ranks wait")
            if goes_on:
                (directory / "continue").touch()
            assert started.code() == 0, started.output[-8000:]
        assert {event["step"] for event in trace.events("pauses")} == {GATE + 1}
        assert len(trace.events("stream_sync")) == 2 and len(trace.events("continued")) == goes_on
    assert [one.ending for one in incidents(directory)] == ([] if goes_on else ["saved"])
    assert [one.steps_lost for one in incidents(directory)] == ([] if goes_on else [0])
    assert differences(undisturbed(2), directory / "final.pt") == []
