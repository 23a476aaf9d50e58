"""Reads all parameters over and over from a second thread while the graph runs, and checks what the counters promise.

Prints one JSON line: how many readings the counters called whole and how many not, and how many of the whole ones were
not exactly the state at the end of that step. `--pynative`: without a graph.
"""

from __future__ import annotations

import json
import sys
import threading

import mindspore as ms
import numpy as np
import xxhash
from mindspore import nn
from mindspore.train import Callback, Model

from lastgasp_mindformers.gate import UpdateGate

STEPS, WIDTH, DEPTH, BATCH = 60, 160, 6, 16


class Watched(Callback):  # type: ignore[misc]
    """Compares what the other thread reads with what the training thread sees at the end of each step."""

    def __init__(self, optimizer: nn.Optimizer, gate: UpdateGate) -> None:
        self._params, self._gate = list(optimizer.get_parameters()), gate
        self.whole: dict[int, str] = {0: self._digest()}
        self.readings: list[tuple[int, str]] = []
        self.torn = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _digest(self) -> str:
        hashed = xxhash.xxh3_128()
        for param in self._params:
            hashed.update(param.asnumpy().tobytes())
        return hashed.hexdigest()

    def _read(self) -> None:
        while not self._over.is_set():
            before = self._gate.read()
            if not self._gate.seen:
                continue  # nobody trusts them before they have moved: in the first step 2.7.0 shows what was before it
            digest = self._digest()
            if before[0] == before[1] and before == self._gate.read():
                self.readings.append((before[1], digest))
            else:
                self.torn += 1

    def on_train_step_end(self, run_context: ms.train.RunContext) -> None:
        """The graph has returned."""
        self.whole[int(run_context.original_args().cur_step_num)] = self._digest()

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join()


def main() -> None:
    """Train, and tell."""
    ms.set_context(mode=ms.PYNATIVE_MODE if "--pynative" in sys.argv else ms.GRAPH_MODE)
    ms.set_device("CPU")
    ms.set_seed(1)
    random = np.random.default_rng(0)
    number = STEPS * BATCH
    data = random.random((number, WIDTH)).astype(np.float32), random.integers(0, 4, number).astype(np.int32)
    dataset = ms.dataset.NumpySlicesDataset(data, shuffle=False).batch(BATCH)
    net = nn.SequentialCell(*(nn.Dense(WIDTH, WIDTH) for _ in range(DEPTH)), nn.Dense(WIDTH, 4))
    optimizer = nn.Adam(net.trainable_params(), 0.001)
    gate = UpdateGate(optimizer)
    watched = Watched(optimizer, gate)
    model = Model(net, nn.CrossEntropyLoss(), optimizer)
    try:
        model.train(1, dataset, callbacks=[watched], dataset_sink_mode=False)
    finally:
        watched.close()
    wrong = [step for step, digest in watched.readings if watched.whole.get(step) != digest]
    saved = [name for name, _ in model.train_network.parameters_and_names()]
    told = {
        "whole": len(watched.readings),
        "torn": watched.torn,
        "wrong": len(wrong),
        "steps": len({step for step, _ in watched.readings}),
        "counted": gate.read(),
        "ours": [name for name in saved if "lastgasp" in name],
    }
    gate.undo()
    print(json.dumps(told | {"undone": type(optimizer) is nn.Adam}))


if __name__ == "__main__":
    main()
