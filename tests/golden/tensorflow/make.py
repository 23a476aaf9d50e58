"""Makes the checkpoints of this folder with the real TensorFlow: `python make.py`, with tensorflow-cpu 2.21.0."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def main(folder: Path) -> None:
    """Three saves of a manager that keeps two."""
    import tensorflow as tf

    step = tf.Variable(0, dtype=tf.int64)
    content: dict[str, Any] = {
        "kernel": tf.Variable(tf.reshape(tf.range(60.0), [4, 5, 3])),
        "half": tf.Variable(tf.cast(tf.range(7), tf.bfloat16)),
        "flags": tf.Variable([True, False, True]),
        "words": tf.Variable(["one", "two and a half", ""]),
        "empty": tf.Variable(tf.zeros([0, 3])),
        "step": step,
    }
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(**content), str(folder), max_to_keep=2)
    for number in (10, 20, 30):
        step.assign(number)
        manager.save(checkpoint_number=number)


if __name__ == "__main__":
    main(Path(__file__).parent)
