"""The demo's story, chapter by chapter. Every claim becomes a `Check`; nothing is taken for granted.

(a) train to the end; (b) again, with rank 0 killed inside backward; (c) compare the weights bit by bit;
(d) flip one bit of the newest checkpoint and start once more.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from lastgasp.checkpoint import SingleFile, candidates
from lastgasp.errors import ConfigError, LastgaspError
from lastgasp.events import Incident
from lastgasp.testing.corrupt import flip_bit
from lastgasp.testing.faults import ENV_FAULT, ENV_LOG, read_log
from lastgasp.testing.jobs import Finished, run_job
from lastgasp.testing.weights import differences, records

from .incident import last_incident
from .verify import Report

STEPS, EVERY, FAULT_STEP = 60, 20, 33
JOB_TIMEOUT = 400.0
"""Seconds that one job may take; it needs about ten."""
RANKS = 2


class Check(msgspec.Struct, frozen=True):
    """One claim and what was seen."""

    what: str
    expected: str
    got: str
    ok: bool


class Summary(msgspec.Struct, frozen=True):
    """`demo.json`."""

    ok: bool
    seconds: dict[str, float]
    """How long each job took."""
    checks: list[Check]
    incident: Incident | None
    kill_to_first_byte_ms: float | None = None
    """From just before the SIGKILL, as the victim itself noted it on disk, to the survivor's first byte."""
    version: int = 1


@dataclass
class Demo:
    """One demo and what it has found so far.

    Args:
        out: a directory of its own; `uninterrupted` and `killed` in it are removed first.
        script: the training script.
        tell: called with what begins, one line each.
    """

    out: Path
    script: Path
    tell: Callable[[str], None]
    checks: list[Check] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    incident: Incident | None = None
    kill_to_first_byte_ms: float | None = None

    def play(self) -> Summary:
        """All chapters; what goes wrong in one is a failed check and ends the story.

        Raises:
            OSError: `out` cannot be written.
        """
        for name in ("uninterrupted", "killed"):
            shutil.rmtree(self.out / name, ignore_errors=True)
            (self.out / name).mkdir(parents=True)
        (self.out / "faults.log").unlink(missing_ok=True)
        try:
            for chapter in (self._uninterrupted, self._killed, self._record, self._weights, self._bit_flip):
                chapter()
        except (LastgaspError, FileNotFoundError) as error:
            self._check("the demo runs to its end", "yes", str(error), ok=False)
        ok = bool(self.checks) and all(check.ok for check in self.checks)
        return Summary(ok, self.seconds, self.checks, self.incident, self.kill_to_first_byte_ms)

    def _uninterrupted(self) -> None:
        self.tell(f"(a) training {STEPS} steps on {RANKS} ranks, undisturbed, under plain torchrun")
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        self._job("uninterrupted", launcher, "uninterrupted", {})

    def _killed(self) -> None:
        self.tell(f"(b) the same under lastgasp run; rank 0 gets SIGKILL inside backward after step {FAULT_STEP}")
        fault = {
            ENV_FAULT: f"kind=sigkill,rank=0,step={FAULT_STEP},phase=backward",
            ENV_LOG: str(self.out / "faults.log"),
            "LASTGASP_RECOVERY": "restart",  # what is shown is the checkpoint; in place there would be none
        }
        self._job("killed and restarted", ["-m", "lastgasp", "run"], "killed", fault)
        fired = [f"{f['kind']} of rank {f['at_rank']} in {f['phase']}, step {f['at_step']}"
                 for f in read_log(self.out / "faults.log")]  # fmt: skip
        self._equal("the fault happened", f"sigkill of rank 0 in backward, step {FAULT_STEP}", "; ".join(fired))

    def _record(self) -> None:
        _, incident = last_incident(self.out / "killed")
        self.incident = incident
        self._equal("the step was saved", f"step {FAULT_STEP}, by rank 1",
                    f"step {incident.step_saved}, by rank {', '.join(map(str, incident.savers))}")  # fmt: skip
        self._equal("steps lost", "0", str(incident.steps_lost))
        for fired in read_log(self.out / "faults.log"):
            if incident.phases.first_byte is not None and isinstance(killed := fired["wall_ns"], int):
                self.kill_to_first_byte_ms = round((incident.phases.first_byte - killed) / 1e6, 2)

    def _weights(self) -> None:
        self.tell("(c) comparing the final weights bit by bit")
        self._same_weights("final weights, killed or not")

    def _bit_flip(self) -> None:
        self._equal("every checkpoint verifies", "all good", _states(self._verify()))
        newest = candidates([self.out / "killed"], SingleFile())[0].path
        offset = newest.stat().st_size // 2
        flip_bit(newest, offset)
        self.tell(f"(d) flipped one bit of {newest.name}, byte {offset}; starting once more")
        self._named(self._verify(), newest, offset)
        (self.out / "killed" / "final.pt").unlink()
        self._job("resumed from an older one", ["-m", "lastgasp", "run"], "killed", {})
        kept = sorted(path.name for path in (self.out / "killed").glob(f"{newest.name}.corrupt*"))
        self._check("the damaged one is set aside", f"{newest.name}.corrupt", ", ".join(kept[:1]) or "no", bool(kept))
        self._same_weights("final weights after the flipped bit")

    def _named(self, report: Report, path: Path, offset: int) -> None:
        found = [d for row in report.checkpoints for d in row.damages]
        said = "; ".join(f"{d.file} bytes {d.begin}-{d.end}" for d in found) or "nothing"
        right = len(found) == 1 and found[0].file == path.name and found[0].begin <= offset < found[0].end
        self._check("verify names file and bytes", f"{path.name}, around {offset}", said, right)

    def _same_weights(self, what: str) -> None:
        mine, other = self.out / "uninterrupted" / "final.pt", self.out / "killed" / "final.pt"
        tensors = len(records(mine)) - 1
        differ = differences(mine, other)
        self._check(what, f"{tensors} tensors bit-equal", f"{tensors - len(differ)} bit-equal", not differ)

    def _verify(self) -> Report:
        command = [sys.executable, "-m", "lastgasp", "verify", "--json", str(self.out / "killed")]
        done = run_job(command, self.out / "verify.log", timeout=60)
        try:
            return msgspec.json.decode(done.output, type=Report)
        except msgspec.DecodeError:
            raise LastgaspError(f"lastgasp verify reported: {done.output.strip()[-500:]}") from None

    def _job(self, name: str, launcher: list[str], where: str, extra: Mapping[str, str]) -> None:
        """Run the training script in `where` and check how it ended.

        Raises:
            LastgaspError: it did not succeed, so that the rest makes no sense.
        """
        place, log = self.out / where, self.out / f"{name.replace(' ', '-')}.log"
        command = [sys.executable, *launcher, "--nproc-per-node", str(RANKS), str(self.script)]
        command += ["--dir", str(place), "--final", str(place / "final.pt"), "--steps", str(STEPS)]
        command += ["--every", str(EVERY)]
        done = run_job(command, log, timeout=JOB_TIMEOUT, environ={**_clean_environ(), **extra})
        self.seconds[name] = round(done.seconds, 2)
        self._equal(f"{name}: job ends by itself", "exit code 0, no process left", _ending(done))
        if done.returncode != 0:
            raise LastgaspError(f"{name} failed, see {log}: {_last_line(done.output)}")

    def _equal(self, what: str, expected: str, got: str) -> None:
        self._check(what, expected, got or "nothing", expected == got)

    def _check(self, what: str, expected: str, got: str, ok: bool) -> None:
        self.checks.append(Check(what, expected, got, ok))


def find_script() -> Path:
    """The example of the checkout, else the copy in the wheel.

    Raises:
        ConfigError: there is neither.
    """
    package = Path(__file__).parents[1]
    places = [
        package.parents[1] / "examples" / "lightning_digits" / "train.py",
        package / "_examples" / "lightning_digits.py",
    ]
    for place in places:
        if place.is_file():
            return place
    raise ConfigError("example", str(places[0]), "the file train.py or its copy in the package",
                      "Install lastgasp from a wheel, or run the demo in a checkout.")  # fmt: skip


def _clean_environ() -> dict[str, str]:
    """Without what a surrounding job or drill has set, and one thread per rank."""
    ours = ("LASTGASP", "TORCHELASTIC", "MASTER_", "PL_")
    job = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")
    kept: Iterator[tuple[str, str]] = (
        (name, value) for name, value in os.environ.items() if not name.startswith(ours) and name not in job
    )
    return {**dict(kept), "OMP_NUM_THREADS": "1"}


def _ending(done: Finished) -> str:
    if done.returncode is None:
        return f"killed after {JOB_TIMEOUT:g} s"
    left = f"left: {'; '.join(done.left)}" if done.left else "no process left"
    return f"exit code {done.returncode}, {left}"


def _states(report: Report) -> str:
    bad = [f"{Path(row.path).name}: {row.state}" for row in report.checkpoints if row.state != "good"]
    return "; ".join(bad) or "all good"


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
