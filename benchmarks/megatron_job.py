"""A training of the real Megatron that measures itself; `bench_megatron` starts it.

`BENCH_MODE=added`: blocks of iterations with lastgasp's hooks and without, by turns. `BENCH_MODE=gasp`: saves and loads
of the state after two iterations. Either writes its samples as JSON to `BENCH_OUT`; `BENCH_SHAPE` is two counts, see
there.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
from support.megatron import cpu  # noqa: E402

cpu.apply()

import torch  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.training import ft_integration, get_args, pretrain, training  # noqa: E402
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args  # noqa: E402
from megatron.training.arguments import parse_and_validate_args  # noqa: E402
from torch import distributed  # noqa: E402

import lastgasp_megatron  # noqa: E402
from benchmarks.harness import drop_cache, interleave, timed, warm_cache  # noqa: E402
from lastgasp.checkpoint import candidates, verify  # noqa: E402
from lastgasp.config import GaspConfig  # noqa: E402
from lastgasp.topology import Place  # noqa: E402
from lastgasp_megatron import installation  # noqa: E402
from lastgasp_megatron.compose import file_in_checkpoint  # noqa: E402
from lastgasp_megatron.preload import MegatronPreload  # noqa: E402
from lastgasp_megatron.state import MegatronState  # noqa: E402
from lastgasp_megatron.steps import Built  # noqa: E402
from lastgasp_megatron.topology import replicas_of  # noqa: E402
from lastgasp_megatron.tracker import LAYOUT, checkpoint_path  # noqa: E402
from support.megatron import train_gpt  # noqa: E402

SKIP = 2
"""First iterations of a block that do not count."""
ITERATIONS = 2
"""Before a gasp is measured."""
Samples = dict[str, list[float]]


class Toggled:
    """Blocks of iterations in the order on, off, off, on; called where Megatron begins an iteration.

    Args:
        pairs, length: blocks of each kind; iterations of a block.
    """

    def __init__(self, pairs: int, length: int) -> None:
        self._length, self._last = length, 2 * pairs * length
        self._count = 0
        self._stamps: list[tuple[int, int]] = []
        self._control = _control_cpu_ns()
        self._on = True
        clocks = ("wall", "cpu", "control")
        self.samples: Samples = {f"{kind} {clock}": [] for kind in ("on", "off") for clock in clocks}

    def __call__(self) -> None:
        """The next iteration begins."""
        self._stamps.append((time.perf_counter_ns(), time.thread_time_ns()))
        if self._count % self._length == 0:
            if self._count:
                self._keep()
            if self._count < self._last:
                self._switch((self._count // self._length) % 4 in (0, 3))
            self._stamps = self._stamps[-1:]
        self._count += 1

    def _keep(self) -> None:
        """Means of the block that has just ended, in ns per iteration."""
        first, last, number = self._stamps[SKIP], self._stamps[-1], self._length - SKIP
        wall, cpu = ((b - a) / number for a, b in zip(first, last, strict=True))
        before, self._control = self._control, _control_cpu_ns()
        kind = "on" if self._on else "off"
        for clock, value in (("wall", wall), ("cpu", cpu), ("control", (self._control - before) / self._length)):
            self.samples[f"{kind} {clock}"].append(value)

    def _switch(self, on: bool) -> None:
        """Put all hooks in place, or all back."""
        if on == self._on:
            return
        self._on = on
        installed = installation._installed
        assert installed is not None and installed._late is not None
        hooks = installed._late
        run = hooks.hooks[0].around.__self__._run  # type: ignore[attr-defined]
        steps = run.state.steps
        if on:
            hooks.place()
            steps.install()
        else:
            steps.uninstall()
            hooks.undo()
        assert hasattr(training.train_step, "__wrapped__") is on and ("step" in vars(steps._inners[0])) is on


def _control_cpu_ns() -> int:
    """CPU time of lastgasp's own threads so far."""
    threads = [thread.native_id for thread in threading.enumerate() if thread.name.startswith("lastgasp")]
    return sum(int(Path(f"/proc/self/task/{one}/schedstat").read_text().split()[0]) for one in threads)


def measure_added(pairs: int, length: int) -> Samples:
    """Train that many blocks, and one iteration more."""
    toggled = Toggled(pairs, length)
    lastgasp_megatron.install()
    ft_integration.on_training_step_start = toggled
    _train()
    return toggled.samples


def measure_gasp(rounds: int, loads: int) -> Samples:
    """Train, then save (`rounds` times) and load (`loads` times, on one rank only)."""
    original, found = training.train, {}

    def train(*args: Any, **kwargs: Any) -> Any:
        original(*args, **kwargs)
        bench = _Gasps(*args[1:4])
        found.update(bench.saves(rounds))
        if loads:
            found.update(bench.loads(loads))
        raise SystemExit(0)  # and no save of Megatron's

    training.train = train
    _train()
    return found


class _Gasps:
    """Saves of a state that nobody changes."""

    def __init__(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        args = get_args()
        args.iteration = ITERATIONS
        self._rank, self._folder = distributed.get_rank(), Path(args.save)
        place = Place(rank=self._rank, world_size=distributed.get_world_size(), replicas=replicas_of(args), job="bench")
        self._state = MegatronState(
            Built(args, list(model), optimizer, scheduler), GaspConfig.resolve(self._folder), place, MagicMock()
        )
        self._state.iteration_begin()
        self._checkpoint = checkpoint_path(self._folder, ITERATIONS)

    def saves(self, rounds: int) -> Samples:
        """Seconds of a gasp, published, and of torch.save of the same content; on rank 0."""
        self._gasp()
        distributed.barrier()
        contents = {path: torch.load(path, weights_only=False) for path in self._files()} if self._rank == 0 else {}
        size = sum(path.stat().st_size for path in contents)
        variants: dict[str, Callable[[], float]] = {
            "gasp": self._gasp,
            "torch.save": partial(timed, partial(self._plain, contents)),
        }
        found = interleave(variants, rounds, self._clean)
        if self._rank == 0 and abs(sum(path.stat().st_size for path in contents) / size - 1) > 0.01:
            raise RuntimeError("the two did not write the same")
        self._clean()
        self._gasp()
        return found | {"bytes": [float(size)]}

    def loads(self, rounds: int) -> Samples:
        """Seconds of loading all files, and of verifying before."""
        found: Samples = {}
        for temperature, prepare in (("cold", drop_cache), ("warm", warm_cache)):
            variants = {
                f"load {temperature}": partial(timed, self._load),
                f"verify + load {temperature}": partial(timed, self._verify_and_load),
            }
            found |= interleave(variants, rounds, partial(self._each, prepare))
        return found

    def _files(self) -> list[Path]:
        return sorted(self._checkpoint.rglob("*.pt"))

    def _gasp(self) -> float:
        distributed.barrier()
        begun = time.perf_counter()
        result = self._state.source.save(ITERATIONS, {}, "bench")
        if self._rank == 0:
            self._state.source.publish(result, {0: result.part})
        return time.perf_counter() - begun

    def _plain(self, contents: dict[Path, Any]) -> None:
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                torch.save(content, file)
                os.fsync(file.fileno())

    def _clean(self) -> None:
        distributed.barrier()
        if self._rank == 0:
            for path in self._files():
                path.unlink()
            LAYOUT.manifest_path(self._checkpoint).unlink(missing_ok=True)
            for folder in sorted((p for p in self._checkpoint.rglob("*") if p.is_dir()), reverse=True):
                folder.rmdir()
            if self._checkpoint.exists():
                self._checkpoint.rmdir()
            os.sync()
        distributed.barrier()

    def _each(self, prepare: Callable[[Path], object]) -> None:
        for path in self._files():
            prepare(path)

    def _load(self) -> list[Any]:
        """As Megatron does."""
        return [torch.load(path, map_location="cpu", weights_only=False) for path in self._files()]

    def _verify_and_load(self) -> list[Any]:
        """As a start with lastgasp does: names and sizes, then each file verified while it is loaded."""
        (found,) = candidates([self._folder], LAYOUT)
        preload = MegatronPreload(file_in_checkpoint, optimizer=True, first=True)
        verdict = verify(self._checkpoint, LAYOUT, read_by_others=preload.covers(found))
        damages = preload.read(found)
        assert verdict.ok and not damages, (verdict, damages)
        with preload.handed_out():
            return self._load()


def _train() -> None:
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    try:
        pretrain(config, train_gpt.datasets, ModelType.encoder_or_decoder, train_gpt.forward_step)
    except SystemExit as stop:  # --exit-interval's, and that of `measure_gasp`
        if stop.code not in (None, 0):
            raise


def main() -> None:
    """Measure, write."""
    one, two = map(int, os.environ["BENCH_SHAPE"].split(","))
    modes = {"added": measure_added, "gasp": measure_gasp}
    samples = modes[os.environ["BENCH_MODE"]](one, two)
    if int(os.environ.get("RANK", "0")) == 0:
        Path(os.environ["BENCH_OUT"]).write_text(json.dumps(samples))


if __name__ == "__main__":
    main()
