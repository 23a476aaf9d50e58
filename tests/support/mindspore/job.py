"""Real MindSpore and MindFormers jobs: their command line, their environment, and the losses they logged."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lastgasp.testing.jobs import Finished, run_job
from support.mindspore import place
from support.ports import free_port

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
EXAMPLE = REPOSITORY / "examples/mindformers_llama"
LENGTH, BATCH = 32, 4


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training script on one or two ranks.

    Attributes:
        folder: working directory; losses go to `losses` in it, logs of msrun to `msrun`.
        ranks: processes; 1 without msrun, unless the launcher is "run".
        launcher: "msrun" without lastgasp; "run" is `lastgasp run --framework mindspore`; "start" is one process with
            the plugin's hooks, as the `.pth` file of an installed lastgasp places them.
        launch_options: of the launcher.
        version: of mindformers, one of `place.VERSIONS`.
        script: what each rank runs.
        arguments: of the script.
    """

    folder: Path
    ranks: int = 2
    launcher: str = "msrun"
    launch_options: Sequence[str] = field(default=())
    version: str = place.MAIN
    script: Path = HERE / "train_plain.py"
    arguments: Sequence[str] = field(default=())

    def command(self) -> list[str]:
        """The whole command line, run in `folder`."""
        binaries = place.python(self.version).parent
        script, python = [str(self.script), *self.arguments], str(binaries / "python")
        there = ["env", "-C", str(self.folder)]
        numbers = [f"--worker_num={self.ranks}", f"--local_worker_num={self.ranks}", f"--master_port={free_port()}"]
        options = [*numbers, f"--log_dir={self.folder / 'msrun'}", "--join=True", *self.launch_options]
        if self.launcher == "start":
            return [*there, python, "-m", "lastgasp_mindformers.start", *script]
        if self.launcher == "run":
            return [*there, python, "-m", "lastgasp", "run", "--framework", "mindspore", *options, *script]
        return [*there, str(binaries / "msrun"), *options, *script] if self.ranks > 1 else [*there, python, *script]

    def environment(self) -> dict[str, str]:
        """That of this process, with what MindSpore needs."""
        paths = [str(REPOSITORY / path) for path in ("core", "plugins/mindformers", "tests")]
        own = {
            "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join((str(place.python(self.version).parent), os.environ.get("PATH", ""))),
            "PYTHONPATH": os.pathsep.join(paths),
            "LOSSES_DIR": str(self.folder / "losses"),
            "GLOG_v": "2",
        }
        return os.environ | own

    def prepare(self) -> None:
        """What must be there before it starts; harmless a second time."""
        (self.folder / "losses").mkdir(parents=True, exist_ok=True)

    def run(self, environ: Mapping[str, str] | None = None, *, timeout: float = 300.0) -> Finished:
        """Run it to its end, or to `timeout` seconds; `environ` is added to its environment."""
        self.prepare()
        log = self.folder / f"log-{len(list(self.folder.glob('log-*')))}"
        return run_job(self.command(), log, timeout=timeout, environ=self.environment() | dict(environ or {}))

    def losses(self) -> dict[tuple[int, int], list[str]]:
        """(rank, completed steps) -> the exact loss, once for each time that the step was trained."""
        found: dict[tuple[int, int], list[str]] = {}
        for path in sorted((self.folder / "losses").glob("rank-*.txt")):
            for line in path.read_text().splitlines():
                _, step, loss = line.split()
                found.setdefault((int(path.stem.split("-")[1]), int(step)), []).append(loss)
        return found

    def steps(self, rank: int) -> list[list[int]]:
        """For each process of `rank`, in order, the steps that it completed."""
        found: dict[str, list[int]] = {}
        for line in (self.folder / f"losses/rank-{rank}.txt").read_text().splitlines():
            process, step, _ = line.split()
            found.setdefault(process, []).append(int(step))
        return list(found.values())


@dataclass(frozen=True, kw_only=True)
class LlamaJob(Job):
    """The tiny LLaMA of examples/mindformers_llama without its `lastgasp` section; it writes to `output` in `folder`.

    Attributes:
        each_epoch: steps.
        epochs: of the whole training.
        every: steps between two periodic saves.
        changes: of the YAML: "dotted.key" -> value; a list's element by its number.
    """

    script: Path = HERE / "train_llama.py"
    each_epoch: int = 8
    epochs: int = 2
    every: int = 4
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def yaml(self) -> Path:
        """What the script gets."""
        return self.folder / "llama.yaml"

    @property
    def checkpoints(self) -> Path:
        """Where MindFormers saves: `rank_R` directories in it."""
        return self.folder / "output" / "checkpoint"

    def command(self) -> list[str]:
        """With the YAML as the script's only argument."""
        return [*super().command(), str(self.yaml)]

    def prepare(self) -> None:
        """Write the YAML and the dataset."""
        super().prepare()
        samples = BATCH * self.ranks * self.each_epoch
        own = {
            "output_dir": str(self.folder / "output"),
            "use_parallel": self.ranks > 1,
            "model.model_config.num_layers": 1,  # half of what a second one takes to compile
            "runner_config.epochs": self.epochs,
            "runner_config.batch_size": BATCH,
            "train_dataset.data_loader.dataset_dir": str(dataset(samples, self.version)),
            "callbacks.1.save_checkpoint_steps": self.every,
        }
        config = yaml.safe_load((EXAMPLE / "llama.yaml").read_text())
        del config["lastgasp"]  # a job without lastgasp, unless `changes` says otherwise
        for key, value in (own | dict(self.changes)).items():
            change(config, key, value)
        self.yaml.write_text(yaml.safe_dump(config, sort_keys=False))


def change(config: Any, key: str, value: Any) -> None:
    """Set "dotted.key"; "callbacks.-" appends."""
    *way, last = key.split(".")
    for name in way:
        config = config[int(name)] if isinstance(config, list) else config.setdefault(name, {})
    if isinstance(config, list) and last == "-":
        config.append(value)
    elif isinstance(config, list):
        config[int(last)] = value
    else:
        config[last] = value


def dataset(samples: int, version: str = place.MAIN, length: int = LENGTH) -> Path:
    """A MindRecord file of real text, one token longer than `length`; made once and kept beside the environment."""
    kept = place.folder(version) / "texts" / f"{samples}-{length}"
    if not kept.exists():
        made = kept.with_name(f"{kept.name}.{uuid.uuid4().hex}")
        made.mkdir(parents=True)
        command = [str(place.python(version)), str(EXAMPLE / "text_to_mindrecord.py"), str(made)]
        subprocess.run([*command, str(samples), str(length)], check=True, timeout=120, stdin=subprocess.DEVNULL)
        try:
            made.rename(kept)
        except OSError:  # another process was first
            if not kept.exists():
                raise
    return kept / "train.mindrecord"
