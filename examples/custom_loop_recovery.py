"""Kills a custom training loop, a small GAN, in the middle, and shows that the result does not change.

    python examples/custom_loop_recovery.py

Trains twice by `tfdist run`: first undisturbed, then with a process that kills itself. The launcher restarts it, and
`LoopRecovery` continues from the newest checkpoint in the middle of an epoch. The last line compares the weights.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

from tfdist import cluster
from tfdist.recovery import LoopRecovery

_DIRECTORY = flags.DEFINE_string("directory", None, "For the process that trains: of checkpoints and weights.")
_KILL_AT_STEP = flags.DEFINE_integer("kill_at_step", -1, "For the process that trains: when it kills itself.")
_EPOCHS = flags.DEFINE_integer("epochs", 3, "Passes over the data.", lower_bound=1)
_STEPS = 20  # of an epoch


def work(directory: Path) -> None:
    """Trains a generator of points on a circle, and a critic."""
    keras.utils.set_random_seed(0)
    generator = keras.Sequential([keras.Input((2,)), keras.layers.Dense(16, "gelu"), keras.layers.Dense(2)])
    critic = keras.Sequential([keras.Input((2,)), keras.layers.Dense(16, "gelu"), keras.layers.Dense(1)])
    generator_optimizer, critic_optimizer = keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3)
    mean_loss = keras.metrics.Mean()
    angles = tf.range(32 * _STEPS, dtype=tf.float32)
    points = tf.stack([tf.cos(angles), tf.sin(angles)], axis=1)
    dataset = tf.data.Dataset.from_tensor_slices(points).shuffle(len(points)).batch(32)
    loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

    @tf.function
    def train_step(batch: tf.Tensor, noise: tf.Tensor) -> None:
        with tf.GradientTape(persistent=True) as tape:
            made, real = critic(generator(noise)), critic(batch)
            critic_loss = loss_of(tf.ones_like(real), real) + loss_of(tf.zeros_like(made), made)
            generator_loss = loss_of(tf.ones_like(made), made)
        for loss, model, optimizer in (
            (critic_loss, critic, critic_optimizer),
            (generator_loss, generator, generator_optimizer),
        ):
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        mean_loss.update_state(critic_loss)

    is_first_attempt = os.environ.get("TFDIST_ATTEMPT", "0") == "0"
    with LoopRecovery(
        directory / "checkpoints",
        model={"generator": generator, "critic": critic},
        optimizer=[generator_optimizer, critic_optimizer],
        state={"loss": mean_loss},
        every_steps=8,
    ) as recovery:
        for epoch in recovery.epochs(_EPOCHS.value):
            mean_loss.reset_state()
            for step, batch in recovery.steps(dataset):
                train_step(batch, tf.constant(np.random.normal(size=[32, 2]), tf.float32))
                if step == _KILL_AT_STEP.value and is_first_attempt:
                    os.kill(os.getpid(), signal.SIGKILL)
            print(f"epoch {epoch + 1}: loss of the critic {float(mean_loss.result()):.4f}", flush=True)
    np.savez(directory / "weights.npz", *generator.get_weights(), *critic.get_weights())


def train(directory: Path, *, kill_at_step: int) -> list[np.ndarray]:
    """Runs this script under `tfdist run`; returns the weights."""
    directory.mkdir()
    arguments = [f"--directory={directory}", f"--kill_at_step={kill_at_step}", f"--epochs={_EPOCHS.value}"]
    launcher = [sys.executable, "-m", "tfdist.launch", "run", "--workers", "1", "--max-restarts", "2"]
    subprocess.run([*launcher, __file__, *arguments], check=True)
    with np.load(directory / "weights.npz") as weights:
        return [weights[name] for name in weights.files]


def main(_: list[str]) -> None:
    """Trains, or starts both trainings and compares the results."""
    if cluster.detect() is not None:
        work(Path(_DIRECTORY.value or "."))
        return
    at = _EPOCHS.value * _STEPS // 2
    with tempfile.TemporaryDirectory() as folder:
        print("Undisturbed:", flush=True)
        undisturbed = train(Path(folder, "undisturbed"), kill_at_step=-1)
        print(f"The process kills itself in step {at}:", flush=True)
        disturbed = train(Path(folder, "disturbed"), kill_at_step=at)
    equal = all(np.array_equal(*pair) for pair in zip(undisturbed, disturbed, strict=True))
    print(f"custom loop: killed in step {at} of {_EPOCHS.value * _STEPS}; weights bit-identical: {equal}")
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    app.run(main)
