"""What the real TensorFlow makes of our files, for `test_tensorflow_real.py`: `python manager_child.py WHAT FOLDER`.

WHAT is `save` (save without end, one line for each that is sealed), `restore` (the newest good one, into JSON),
`go-on` (the same, then two more saves), `unsealed` (one save that is not sealed), `best` (three saves and, sealed after
each, what `Checkpoint.write` makes of the best model), `state` (what TensorFlow reads in the state file), or `read`
(all tensors of FOLDER, which is a prefix here).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

from lastgasp.tensorflow import newest_good, seal

KEEP = 2


class Job:
    """Two variables that are equal in each checkpoint."""

    def __init__(self, folder: str) -> None:
        self.one = tf.Variable(tf.zeros([50_000]))
        self.other = tf.Variable(tf.zeros([3]))
        self.checkpoint = tf.train.Checkpoint(one=self.one, other=self.other)
        self.prefix = newest_good(folder)
        self.manager = tf.train.CheckpointManager(self.checkpoint, folder, max_to_keep=KEEP)
        if self.prefix:
            self.checkpoint.restore(self.prefix).assert_consumed()

    @property
    def values(self) -> list[float]:
        """All that occur in the variables."""
        return sorted({float(value) for variable in (self.one, self.other) for value in variable.numpy().ravel()})

    def save(self, number: int) -> str:
        """Fill the variables with `number` and save it under that number."""
        for variable in (self.one, self.other):
            variable.assign(tf.fill(variable.shape, float(number)))
        return str(self.manager.save(checkpoint_number=number))


def main(what: str, folder: str) -> None:
    """See above."""
    if what == "read":
        reader = tf.train.load_checkpoint(folder)
        names = reader.get_variable_to_shape_map()
        tell({name: [float(value) for value in reader.get_tensor(name).ravel()[:3]] for name in sorted(names)})
        return
    if what == "state":
        state = tf.train.get_checkpoint_state(folder)
        tell({"latest": state.model_checkpoint_path, "kept": list(state.all_model_checkpoint_paths)})
        return
    job = Job(folder)
    begin = int(job.values[0])
    if what == "save":
        for number in range(begin + 1, 100_000):
            print("sealed", seal(job.save(number)), flush=True)
    if what == "unsealed":
        job.save(begin + 1)
    for number in (1, 2, 3) if what == "best" else ():
        seal(job.save(number))
        for name in ("best", f"top-{number}"):
            seal(job.checkpoint.write(f"{folder}/{name}"), step=number)
    more = [Path(seal(job.save(begin + extra))).name for extra in (1, 2)] if what == "go-on" else []
    latest = job.manager.latest_checkpoint
    tell({"prefix": job.prefix, "values": job.values, "more": more, "latest": latest, "kept": job.manager.checkpoints})


def tell(document: dict[str, Any]) -> None:
    """The last line of the output."""
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
