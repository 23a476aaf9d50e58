"""A small ResNet on the 1797 real handwritten digits of scikit-learn, with TensorFlow's own CheckpointManager.

python train.py --dir ckpts        (kill it at any time, and start it again)
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from lastgasp.tensorflow import newest_good, seal

layers = tf.keras.layers
BATCH = 32


def block(x: Any, channels: int, stride: int) -> Any:
    """Two 3x3 convolutions with batch norm around a projected shortcut."""
    y = layers.Conv2D(channels, 3, stride, padding="same", use_bias=False)(x)
    y = layers.ReLU()(layers.BatchNormalization()(y))
    y = layers.BatchNormalization()(layers.Conv2D(channels, 3, padding="same", use_bias=False)(y))
    return layers.ReLU()(y + layers.Conv2D(channels, 1, stride, use_bias=False)(x))


def resnet() -> Any:
    """Three blocks, dropout, ten classes."""
    images = tf.keras.Input((8, 8, 1))
    x = block(block(block(images, 8, 1), 16, 2), 32, 2)
    return tf.keras.Model(images, layers.Dense(10)(layers.Dropout(0.2)(layers.GlobalAveragePooling2D()(x))))


def order(step: int, size: int) -> np.ndarray[Any, Any]:
    """The samples of batch number `step`: each epoch is a permutation of its own, so a resume needs no more than it."""
    epoch, batch = divmod(step, size // BATCH)
    return np.random.default_rng(epoch).permutation(size)[batch * BATCH : (batch + 1) * BATCH]


def main() -> None:
    """Train; resume from the newest good checkpoint in --dir."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", default="ckpts", help="where checkpoints go")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--final", type=Path, help="where the final weights go")
    args = parser.parse_args()

    tf.keras.utils.set_random_seed(42)
    tf.config.experimental.enable_op_determinism()
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype("float32").reshape(-1, 8, 8, 1), labels.astype("int64")
    model, optimizer, step = resnet(), tf.keras.optimizers.AdamW(3e-3), tf.Variable(0, dtype=tf.int64)
    optimizer.build(model.trainable_variables)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def update(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables))
        return loss

    train_step = tf.function(update)
    # Keras 3 leaves the state of its random numbers out of a model's checkpoint; without it dropout repeats itself.
    seeds = [layer.seed_generator.state.value for layer in model.layers if hasattr(layer, "seed_generator")]
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, step=step, seeds=seeds)
    prefix = newest_good(args.dir)  # verified; before the manager reads its state file
    manager = tf.train.CheckpointManager(checkpoint, args.dir, max_to_keep=3)
    if prefix:
        checkpoint.restore(prefix).assert_consumed()
        print(f"resumed from {prefix}", flush=True)
    while step < args.steps:
        chosen = order(int(step), len(images))
        loss = train_step(images[chosen], labels[chosen])
        print(f"step {int(step.assign_add(1))} loss {float(loss):.9g}", flush=True)
        if step % args.every == 0:
            seal(manager.save(checkpoint_number=int(step)))
    if args.final:
        np.savez(args.final, *model.get_weights())


if __name__ == "__main__":
    main()
