"""Kills a worker in the middle of a training, and shows that the result does not change.

    python examples/recovery.py

Trains the network of `digits.py` twice by `tfdist run --workers 2`: first undisturbed, then with a worker that kills
itself. The launcher restarts both workers, and `FailureRecovery` resumes from the newest checkpoint in the middle of an
epoch. The last line compares the weights of the two trainings.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
from absl import app, flags, logging
from digits import batches, build_model
from digits_dataset import load

from tfdist import cluster
from tfdist.callbacks import FailureRecovery

_DIRECTORY = flags.DEFINE_string("directory", None, "For workers: directory of checkpoints and weights.")
_KILL_AT_STEP = flags.DEFINE_integer(
    "kill_at_step", 0, "For workers: at which step worker 1 kills itself; 0 for never."
)
_EVERY_STEPS = flags.DEFINE_integer("every_steps", 10, "Steps between two checkpoints.", lower_bound=1)
_WORKERS = 2


class KillItself(keras.callbacks.Callback):
    """Kills this process without warning, as a power failure would."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._steps_left = step

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Counts the steps."""
        self._steps_left -= 1
        if self._steps_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def work() -> None:
    """Trains as a worker; the chief writes the weights."""
    from tfdist.strategies import MultiWorkerMirroredStrategy

    directory = Path(_DIRECTORY.value or "checkpoints")
    strategy = MultiWorkerMirroredStrategy(compression="powersgd:4")
    images, _ = load("digits", flags.FLAGS.data_dir)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build_model(tuple(images.element_spec[0].shape))
    callbacks: list[keras.callbacks.Callback] = [FailureRecovery(directory, every_steps=_EVERY_STEPS.value)]
    is_first_attempt = os.environ.get("TFDIST_ATTEMPT", "0") == "0"
    if _KILL_AT_STEP.value and is_first_attempt and strategy.rank == 1:
        callbacks.append(KillItself(_KILL_AT_STEP.value))
    verbose = 2 if strategy.rank == 0 else 0
    model.fit(
        batches(images, shuffle=True), epochs=flags.FLAGS.epochs, shuffle=False, verbose=verbose, callbacks=callbacks
    )
    if strategy.rank == 0:
        np.savez(directory / "weights.npz", *model.get_weights())


def train(directory: Path, *, kill_at_step: int) -> list[np.ndarray]:
    """Runs this script as two workers under `tfdist run`; returns the weights."""
    flags_of_workers = [f"--directory={directory}", f"--kill_at_step={kill_at_step}"]
    flags_of_workers += [f"--{name}={flags.FLAGS[name].value}" for name in ("epochs", "every_steps")]
    if flags.FLAGS.data_dir:
        flags_of_workers.append(f"--data_dir={flags.FLAGS.data_dir}")
    launcher = [sys.executable, "-m", "tfdist.launch", "run", "--workers", str(_WORKERS), "--max-restarts", "2"]
    subprocess.run([*launcher, __file__, *flags_of_workers], check=True)
    with np.load(directory / "weights.npz") as weights:
        return [weights[name] for name in weights.files]


def main(_: list[str]) -> None:
    """Trains as a worker, or starts the workers of both trainings and compares the results."""
    logging.set_verbosity(logging.WARNING)
    if cluster.detect() is not None:
        work()
        return
    images, _ = load("digits", flags.FLAGS.data_dir)  # prepared here, before two workers need it
    steps = -(-len(images) // flags.FLAGS.batch_size) * flags.FLAGS.epochs
    with tempfile.TemporaryDirectory() as folder:
        print("Undisturbed:", flush=True)
        undisturbed = train(Path(folder, "undisturbed"), kill_at_step=0)
        print(f"Worker 1 kills itself after step {steps // 2} of {steps}:", flush=True)
        disturbed = train(Path(folder, "disturbed"), kill_at_step=steps // 2)
    equal = all(np.array_equal(*pair) for pair in zip(undisturbed, disturbed, strict=True))
    print(f"recovery: a worker was killed after step {steps // 2} of {steps}; weights bit-identical: {equal}")
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    app.run(main)
