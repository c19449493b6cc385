"""Trains the network of `digits.py` and writes curves for TensorBoard, which continue over restarts.

    tfdist run --workers 2 --max-restarts 3 examples/monitoring.py --directory run
    tensorboard --logdir run/logs

`TrainingMonitor` writes bytes, step times, the norm of the residuals, restarts and the number of workers. Keras'
TensorBoard callback, on the chief, writes losses and metrics. With `--kill_at_steps 100,200` the last worker kills
itself at these steps, to show that the curves continue.
"""

import os
import signal
from pathlib import Path

import keras
from absl import app, flags, logging
from digits import batches, build_model
from digits_dataset import load

from tfdist.callbacks import FailureRecovery, TrainingMonitor
from tfdist.strategies import MultiWorkerMirroredStrategy

_DIRECTORY = flags.DEFINE_string("directory", "run", "For the directories logs and checkpoints.")
_EVERY_STEPS = flags.DEFINE_integer("every_steps", 5, "Steps between two points of a curve.", lower_bound=1)
_SAVE_EVERY_STEPS = flags.DEFINE_integer("save_every_steps", 20, "Steps between two checkpoints.", lower_bound=1)
_KILL_AT_STEPS = flags.DEFINE_list(
    "kill_at_steps", [], "At which step the last worker kills itself, by attempt. Default: never."
)


class KillItself(keras.callbacks.Callback):
    """Kills this process after a step of the training."""

    is_stateless = True

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Compares the step."""
        if int(self.model.optimizer.iterations.numpy()) == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def main(_: list[str]) -> None:
    """Trains with all workers."""
    logging.set_verbosity(logging.WARNING)
    directory, strategy = Path(_DIRECTORY.value), MultiWorkerMirroredStrategy(compression="powersgd:4")
    images, held_out = load("digits", flags.FLAGS.data_dir)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build_model(tuple(images.element_spec[0].shape))
    callbacks: list[keras.callbacks.Callback] = [
        TrainingMonitor(directory / "logs", every_steps=_EVERY_STEPS.value, timing=True),
        FailureRecovery(directory / "checkpoints", every_steps=_SAVE_EVERY_STEPS.value),
    ]
    if strategy.rank == 0:
        callbacks.append(keras.callbacks.TensorBoard(directory / "logs", write_graph=False))
    attempt = int(os.environ.get("TFDIST_ATTEMPT", "0"))
    if strategy.rank == strategy.num_workers - 1 and attempt < len(_KILL_AT_STEPS.value):
        callbacks.append(KillItself(int(_KILL_AT_STEPS.value[attempt])))
    model.fit(
        batches(images, shuffle=True),
        epochs=flags.FLAGS.epochs,
        shuffle=False,
        verbose=2,
        validation_data=batches(held_out),
        callbacks=callbacks,
    )


if __name__ == "__main__":
    app.run(main)
