"""The demo's story with jobs that only pretend: each claim is checked, and each lie is caught."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from lastgasp.checkpoint import Provenance, SingleFile, Staged, candidates, quarantine, verify
from lastgasp.cli import _demo, main
from lastgasp.events import Fault, Incident, Phases, encode_incident
from lastgasp.testing.jobs import Finished

PNG = b"\x89PNG"


class Stage:
    """Stands in for `run_job`: leaves the files that the real jobs would; it is given `lies` by name."""

    def __init__(self, *lies: str) -> None:
        self.lies, self.environs = lies, list[Mapping[str, str]]()

    def __call__(
        self, command: Sequence[str], log: Path, *, timeout: float, environ: Mapping[str, str] | None = None
    ) -> Finished:
        finished = Finished(returncode=0, seconds=1.0, output="")
        if "verify" in command:
            return replace(finished, output=CliRunner().invoke(main, list(command[3:])).output)
        assert environ is not None
        self.environs.append(environ)
        place = Path(command[command.index("--dir") + 1])
        if "LASTGASP_FAULT" in environ:
            self._killed(place, Path(environ["LASTGASP_FAULT_LOG"]))
        elif place.name == "killed":
            self._fall_back(place)
        for step in (20, 40, 60):
            if not (place / f"step={step}.ckpt").exists():
                self._publish(place, step)
        wrong = 1.0 if f"weights {place.name}" in self.lies else 0.0
        torch.save({"a": torch.arange(4.0) + wrong}, place / "final.pt")
        return replace(finished, returncode=1, output="boom\n") if "crash" in self.lies else finished

    def _killed(self, place: Path, log: Path) -> None:
        fired = {"kind": "sigkill", "phase": "backward", "at_rank": 0, "at_step": 33, "wall_ns": 1_000_000}
        if "no fault" not in self.lies:
            log.write_text(json.dumps(fired) + "\n")
        self._publish(place, 33)
        incident = Incident(
            id="1", job="j", attempt=0, world_size=2, ending="saved",
            phases=Phases(fault=1, first_byte=4_500_000, saved=5_000_000),
            faults=[Fault(kind="killed", rank=0, cause="SIGKILL", step=33, seen_ns=2)],
            step_saved=20 if "old step" in self.lies else 33, steps_lost=0, savers=[1],
        )  # fmt: skip
        (place / "incidents").mkdir()
        (place / "incidents" / "1.json").write_bytes(encode_incident(incident))

    def _fall_back(self, place: Path) -> None:
        newest = candidates([place], SingleFile())[0]
        assert not verify(newest.path, SingleFile()).ok
        if "no quarantine" not in self.lies:
            quarantine(newest, ["damaged"], proven=True)

    def _publish(self, place: Path, step: int) -> None:
        with Staged(place / f"step={step}.ckpt", SingleFile()) as staged:
            staged.open().write(b"state" * 1000)
            staged.publish(Provenance(format="test", step=step, kind="periodic", job="j"))


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict[str, bool], Stage]]:
    def act(*lies: str) -> tuple[int, dict[str, bool], Stage]:
        stage = Stage(*lies)
        monkeypatch.setattr(_demo, "run_job", stage)
        done = CliRunner().invoke(main, ["demo", "--out", str(tmp_path / "out")])
        assert not done.exception or isinstance(done.exception, SystemExit), done.output
        document = json.loads((tmp_path / "out" / "demo.json").read_text())
        checks = {check["what"]: check["ok"] for check in document["checks"]}
        assert document["ok"] == (done.exit_code == 0) == all(checks.values())
        assert done.output.count("FAILED") == list(checks.values()).count(False)
        assert "no fault" in lies or "crash" in lies or document["kill_to_first_byte_ms"] == 3.5
        return done.exit_code, checks, stage

    return act


def test_when_all_is_true_it_says_so(
    play: Callable[..., tuple[int, dict[str, bool], Stage]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LASTGASP_FAULT_LOG", "/elsewhere")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    code, checks, stage = play()
    assert code == 0
    assert len(checks) == 11
    assert (tmp_path / "out/timeline.png").read_bytes().startswith(PNG)
    assert ["LASTGASP_FAULT" in environ for environ in stage.environs] == [False, True, False]
    assert not any("TORCHELASTIC_RESTART_COUNT" in environ for environ in stage.environs)
    assert play()[0] == 0, "a second time over the first one's files"


@pytest.mark.parametrize(
    ("lie", "caught"),
    [
        ("no fault", "the fault happened"),
        ("old step", "the step was saved"),
        ("weights killed", "final weights, killed or not"),
        ("no quarantine", "the damaged one is set aside"),
        ("crash", "uninterrupted: job ends by itself"),
    ],
)
def test_each_lie_is_caught(play: Callable[..., tuple[int, dict[str, bool], Stage]], lie: str, caught: str) -> None:
    code, checks, _ = play(lie)
    assert code == 1
    assert checks[caught] is False


def test_the_example_is_found_in_the_checkout() -> None:
    assert _demo.find_script().name == "train.py"


def test_out_must_be_writable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = CliRunner().invoke(main, ["demo", "--out", str(tmp_path / "file" / "out")])
    assert done.exit_code == 2
    assert "--out" in done.output
