"""Megatron jobs of ranks that TaskD has go on with fewer, and with all of them again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from lastgasp.events import Incident
from support.launchers import finish
from support.megatron.job import SCRIPT, GptJob
from support.megatron.resized import EVALUATES, Done, check, done, job_in
from support.mindio_scaling import GATE, POD, Trained


def check_samples(directory: Path, undisturbed: Path) -> None:
    """The job has had in each step the samples of the other one, as often, has logged each once, and ends alike."""
    check(left(directory), left(undisturbed), job_of(directory), output(directory))


def job_of(directory: Path, flags: str = EVALUATES, ranks: int = 4) -> GptJob:
    """By an agent as TaskD's."""
    return replace(job_in(directory, flags, ranks), launcher="mindx", launch_options=())


def output(directory: Path) -> str:
    """What the job has written."""
    logs = (path for path in sorted(directory.parent.glob("log*")) if path.is_file())
    return "\n".join(path.read_text(errors="replace") for path in logs)


def left(directory: Path) -> Done:
    """What it has left."""
    return done(job_of(directory), output(directory))


@dataclass(frozen=True)
class Gpt(Trained):
    """A GPT through Megatron's `pretrain`.

    Args:
        flags: Megatron's own.
    """

    flags: str = EVALUATES

    def job(self, directory: Path, script: Path | None = None) -> list[str]:
        """As in the base."""
        found = replace(job_of(directory, self.flags, self.ranks), script=script or self.script)
        for name in ("go", f"go-{GATE}"):
            (directory / name).touch()
        return found.command()

    def undisturbed(self, folder: Path) -> Path:
        """As in the base; without lastgasp."""
        job = job_in(folder / "d", self.flags, self.ranks)
        assert finish(job.command(), folder, **job.environment(), SAMPLES="1", LASTGASP="0").ok
        return job.folder

    def environment(self, directory: Path) -> dict[str, str]:
        """As in the base; its recovery in place has to be asked for."""
        own = {"SAMPLES": "1", "HOLD": str(directory / "go"), "HOLDS": str(GATE), "LASTGASP_RECOVERY": "auto"}
        return {**job_of(directory).environment(), **own, **POD, **self.variables}

    def saves(self, directory: Path) -> Path:
        """As in the base."""
        return directory / "ckpt"

    def entered(self, directory: Path, rank: int) -> list[tuple[int, int, int, int]]:
        """As in the base, by the first micro-batch of each entry."""
        found = dict[tuple[int, int, int], tuple[int, int, int, int]]()
        for path in (directory / "losses").glob("samples-*"):
            pid = int(path.name.partition("-")[2])
            for line in path.read_text().splitlines():
                what, *numbers = line.split()[:6]
                step, attempt, incarnation, number, size = map(int, numbers)
                if what == "train" and number == rank:
                    found.setdefault((attempt, incarnation, pid), (pid, step, number, size))
        return [found[key] for key in sorted(found)]

    def check_told(self, directory: Path, *told: Incident) -> None:
        """All have begun with what was saved meanwhile."""
        for one in told:
            assert one.from_files and (self.saves(directory) / f"iter_{one.step_saved:07}").is_dir()

    def check_dumped(self, incident: Incident, step: int) -> None:
        """As in the base; or it was on disk already, as what all were to begin with."""
        ends = ("saved", step), ("nothing_to_save", None)
        assert (incident.ending, incident.step_saved) in ends and incident.steps_lost == 0, incident

    def second(self, directory: Path) -> bool:
        """As in the base."""
        return (directory / "losses" / "second").exists()


GPT = Gpt(SCRIPT, check_samples)
