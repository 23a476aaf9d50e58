"""A plain MindSpore training that measures itself; `bench_mindspore` starts it in the environment of MindSpore.

`BENCH_MODE=added`: blocks of steps with lastgasp's callbacks and without, by turns. `BENCH_MODE=gate`: the compiled
step with the counters of the update and without, by turns. `BENCH_MODE=gasp`: saves and loads of the state after two
steps. Each writes its samples as JSON to `BENCH_OUT`; `BENCH_SHAPE` is rounds, steps of a block, width, layers, batch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.train import Callback, Model

sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.harness import drop_cache, interleave, timed, warm_cache
from lastgasp.adapter.mindspore import LEGACY
from lastgasp.checkpoint import candidates, verify
from lastgasp.topology import Place
from lastgasp_mindformers import LastGasp
from lastgasp_mindformers.gate import gate_of
from lastgasp_mindformers.preload import FilePreload

SKIP = 2
"""First steps of a block that do not count."""
WARM_UP = 6
Samples = dict[str, list[float]]


class Task:
    """What is trained."""

    def __init__(self, width: int, layers: int, batch: int, steps: int) -> None:
        self.net = nn.SequentialCell(*(nn.Dense(width, width, activation="relu") for _ in range(layers)))
        self.optimizer = nn.AdamWeightDecay(self.net.trainable_params(), 1e-4)
        self.batch = ms.Tensor(np.random.default_rng(0).standard_normal((batch, width)).astype(np.float32))
        rows = np.zeros((batch * steps, 1), np.float32)
        self.data = ms.dataset.NumpySlicesDataset((rows,), shuffle=False).batch(batch)

    def network(self) -> Any:
        """The train network: all of a step but its data."""
        return nn.TrainOneStepCell(_Loss(self.net, self.batch), self.optimizer)


class _Loss(nn.Cell):  # type: ignore[misc]
    """The mean square of the outputs; the batch is always the same, so that data costs nothing."""

    def __init__(self, net: Any, batch: Any) -> None:
        super().__init__()
        self.net, self.batch = net, batch

    def construct(self, rows: ms.Tensor) -> ms.Tensor:
        """`rows` only drive the loop."""
        return (self.net(self.batch) ** 2).mean() + 0.0 * rows.mean()


class Toggled(Callback):  # type: ignore[misc]
    """Blocks of steps in the order on, off, off, on."""

    def __init__(self, protection: LastGasp, rounds: int, length: int) -> None:
        super().__init__()
        self._protection, self._length, self._last = protection, length, 2 * rounds * length
        self._count = -WARM_UP
        self._stamps: list[tuple[int, int]] = []
        self._on = True
        self._state: Any = None
        self.samples: Samples = {f"{kind} {clock}": [] for kind in ("on", "off") for clock in ("wall", "cpu")}

    def on_train_step_begin(self, run_context: Any) -> None:
        """One stamp for each step, always at the same place of the loop."""
        self._stamps.append((time.perf_counter_ns(), time.thread_time_ns()))
        if self._count >= 0 and self._count % self._length == 0:
            if self._count:
                self._keep()
            if self._count < self._last:
                self._switch((self._count // self._length) % 4 in (0, 3))
            self._stamps = self._stamps[-1:]
        self._count += 1

    def _keep(self) -> None:
        """Means of the block that has just ended, in ns for a step."""
        first, last, number = self._stamps[SKIP], self._stamps[-1], self._length - SKIP
        for clock, begin, end in zip(("wall", "cpu"), first, last, strict=True):
            self.samples[f"{'on' if self._on else 'off'} {clock}"].append((end - begin) / number)

    def _switch(self, on: bool) -> None:
        """Let lastgasp's callbacks do their work, or return at once."""
        if on != self._on:
            run = self._protection.run
            assert run is not None
            self._on, self._state, run.state = on, run.state, self._state
            assert (run.state is not None) is on


def measure_added(rounds: int, length: int, *shape: int) -> Samples:
    """Train that many blocks, and a step more."""
    steps = WARM_UP + 2 * rounds * length + 1
    task, protection = Task(*shape, steps), LastGasp("ckpts")  # type: ignore[call-arg]
    toggled = Toggled(protection, rounds, length)
    model = Model(task.network())
    model.train(1, task.data, callbacks=[toggled, protection], dataset_sink_mode=False)
    return toggled.samples


def measure_gate(rounds: int, length: int, *shape: int) -> Samples:
    """Seconds of a step, compiled with the counters and without."""
    rows = ms.Tensor(np.zeros((1, 1), np.float32))
    networks = {kind: Task(*shape, 1).network() for kind in ("plain", "gated")}  # type: ignore[call-arg]
    assert gate_of(networks["gated"]) is not None

    def block(network: Any) -> float:
        for _ in range(length):
            network(rows).asnumpy()
        return 0.0

    for network in networks.values():
        block(network)
    variants = {kind: partial(_per_step, partial(block, network), length) for kind, network in networks.items()}
    return interleave(variants, rounds)


def _per_step(block: Callable[[], object], length: int) -> float:
    return timed(block) / length


def measure_gasp(rounds: int, length: int, *shape: int) -> Samples:
    """Train, then save and load `rounds` times."""
    found: Samples = {}
    task, protection = Task(*shape, 2), LastGasp("ckpts")  # type: ignore[call-arg]
    network = task.network()

    class Bench(Callback):  # type: ignore[misc]
        def on_train_end(self, run_context: Any) -> None:
            gasps = _Gasps(protection, network)
            found.update(gasps.saves(rounds))
            found.update(gasps.loads(rounds))

    Model(network).train(1, task.data, callbacks=[Bench(), protection], dataset_sink_mode=False)
    return found


class _Gasps:
    """Saves of a state that nobody changes."""

    def __init__(self, protection: LastGasp, network: Any) -> None:
        run: Any = protection.run
        self._source, self._step, self._network = run.source, run.state.numbers.step, network
        self._folder = Path("ckpts")
        self._plain_path = Path("plain.ckpt")

    def saves(self, rounds: int) -> Samples:
        """Seconds of a gasp, published, and of MindSpore's own save of the same parameters with fsync."""
        variants: dict[str, Callable[[], float]] = {
            "gasp": partial(timed, self._gasp),
            "own": partial(timed, self._own),
        }
        found = interleave(variants, rounds, self._clean)
        self._clean()
        self._own()
        own = self._plain_path.stat().st_size
        self._gasp()
        size = self._file.stat().st_size
        if abs(own - size) > max(4096, 0.01 * size):
            raise RuntimeError(f"the two did not write the same: {own} and {size} bytes")
        return found | {"bytes": [float(size)]}

    def loads(self, rounds: int) -> Samples:
        """Seconds of loading, and of verifying before."""
        found: Samples = {}
        for temperature, prepare in (("cold", drop_cache), ("warm", warm_cache)):
            variants = {
                f"load {temperature}": partial(timed, self._load),
                f"verify + load {temperature}": partial(timed, self._verify_and_load),
            }
            found |= interleave(variants, rounds, partial(self._prepared, prepare))
        return found

    def _prepared(self, prepare: Callable[[Path], object]) -> None:
        prepare(self._file)

    @property
    def _file(self) -> Path:
        (file,) = self._folder.glob("rank_0/*.ckpt")
        return file

    def _gasp(self) -> None:
        result = self._source.save(self._step, {}, "bench")
        self._source.publish(result, {0: result.part})
        self._target = result.staged.target

    def _own(self) -> None:
        ms.save_checkpoint(self._network, str(self._plain_path))
        descriptor = os.open(self._plain_path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def _clean(self) -> None:
        for pattern in ("rank_0/*.ckpt", "*.manifest.json", "*.small", "rank_0/meta.json"):
            for path in self._folder.glob(pattern):
                path.unlink()
        self._plain_path.unlink(missing_ok=True)
        os.sync()

    def _load(self) -> Any:
        return ms.load_checkpoint(str(self._file))

    def _verify_and_load(self) -> Any:
        """As a plain training does: see lastgasp_mindformers.preload."""
        candidate = next(c for c in candidates([self._target.parent], LEGACY) if c.path == self._target)
        file = self._target.parent / "rank_0" / self._file.name
        preload = FilePreload(lambda *_: file, Place(rank=0, world_size=1, replicas=((0,),)))
        check = partial(verify, candidate.path, LEGACY, manifest=candidate.manifest)
        verdict = preload.verdict(candidate, check)
        loaded = preload.take(file)
        assert verdict.ok and loaded, verdict
        return loaded


def main() -> None:
    """Measure, write."""
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    ms.set_seed(1)
    modes = {"added": measure_added, "gate": measure_gate, "gasp": measure_gasp}
    samples = modes[os.environ["BENCH_MODE"]](*map(int, os.environ["BENCH_SHAPE"].split(",")))
    Path(os.environ["BENCH_OUT"]).write_text(json.dumps(samples))


if __name__ == "__main__":
    main()
