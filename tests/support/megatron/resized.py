"""Megatron jobs whose number of ranks changes, and what must hold afterwards: the same samples in each step."""

from __future__ import annotations

import pickle
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lastgasp.checkpoint import DirectoryLayout, candidates, verify
from support.megatron.job import GptJob

LAYOUT = DirectoryLayout("iter_*")
LAST = 12
FLAGS = "--bf16 --micro-batch-size 1 --global-batch-size 12 --attention-dropout 0 --hidden-dropout 0"
EVALUATES = f"{FLAGS} --eval-interval 4 --eval-iters 1"
ROW = re.compile(r"iteration\s+(\d+)/.*?consumed samples:\s+(\d+).*?learning rate: (\S+).*?lm loss: (\S+)")


@dataclass(frozen=True)
class Done:
    """What a job has left: by kind and iteration how often each sample was used; its log; its last checkpoint."""

    samples: dict[tuple[str, int], Counter[str]]
    rows: dict[int, list[tuple[str, str, str]]]
    state: dict[str, Any]


def job_in(folder: Path, flags: str = EVALUATES, ranks: int = 4) -> GptJob:
    """Under `lastgasp run`, with no line of lastgasp in the script."""
    (folder / "losses").mkdir(parents=True, exist_ok=True)
    return GptJob(folder=folder, ranks=ranks, flags=flags, last=LAST, every=5, launcher="run",
                  launch_options=("--framework", "megatron"))  # fmt: skip


def done(job: GptJob, output: str) -> Done:
    """An iteration may have been begun more than once; the last time counts."""
    parts: dict[tuple[str, int], dict[tuple[int, int], Counter[str]]] = {}
    for path in job.losses_folder.glob("samples-*"):
        for line in path.read_text().splitlines():
            what, iteration, attempt, incarnation, _, _, *digests = line.split()
            times = parts.setdefault((what, int(iteration)), {})
            times.setdefault((int(attempt), int(incarnation)), Counter()).update(digests)
    rows: dict[int, list[tuple[str, str, str]]] = {}
    for iteration, *row in ROW.findall(output):
        rows.setdefault(int(iteration), []).append(tuple(row))
    file = job.checkpoints / f"iter_{LAST:07}" / "mp_rank_00" / "model_optim_rng.pt"
    samples = {key: times[max(times)] for key, times in parts.items()}
    return Done(samples, rows, torch.load(file, pickle_module=_Pickle, weights_only=False, map_location="cpu"))


class _Class:
    """Stands for one of Megatron's, which only its own process can import."""

    def __init__(self, *args: object) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Class if module.startswith("megatron.") else super().find_class(module, name)


class _Pickle:
    """What torch takes for the module `pickle`."""

    Unpickler, load = _Unpickler, pickle.load


def check(found: Done, expected: Done, job: GptJob, output: str) -> None:
    """Each step has had the samples of the job without a fault, as often, and has made of them what that made."""
    assert found.samples == expected.samples
    assert {at: [row[:2] for row in rows] for at, rows in found.rows.items()} == {
        at: [row[:2] for row in rows] for at, rows in expected.rows.items()
    }, output[-6000:]
    for name in ("consumed_train_samples", "consumed_valid_samples"):
        assert getattr(found.state["args"], name) == getattr(expected.state["args"], name)
    assert found.state["opt_param_scheduler"] == expected.state["opt_param_scheduler"]
    for name, value in expected.state["model"].items():
        if isinstance(value, torch.Tensor) and not name.endswith("linear_qkv.bias"):  # that of keys is but noise
            torch.testing.assert_close(found.state["model"][name], value, rtol=0.05, atol=0.005)
    assert all(verify(one.path, LAYOUT).ok for one in candidates([job.checkpoints], LAYOUT))
