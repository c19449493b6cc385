"""A worker of `benchmarks/elastic.py`: trains a perceptron, is killed at the given steps, and notes when steps end."""

import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

_MILLION = 10**6
_BATCH = 96
_MOST_STEPS_OF_EPOCH = 1000


def model_of(parameters: int) -> keras.Model:
    """Returns a perceptron with two equal hidden layers and about so many parameters."""
    width = round(parameters**0.5)
    layers = [keras.layers.Dense(width, "tanh"), keras.layers.Dense(width, "tanh"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((32,)), *layers])


class Notes(keras.callbacks.Callback):
    """Writes a line for each event: its kind, the step, the ranks that train, and the time in seconds since 1970."""

    def __init__(self, strategy: Any, folder: Path, kills: list[tuple[int, int]], pause_seconds: float) -> None:
        super().__init__()
        self._strategy, self._folder, self._kills, self._pause = strategy, folder, kills, pause_seconds
        self._rank = strategy.rank
        self._file = (folder / f"events-{self._rank}.jsonl").open("a")

    def _note(self, kind: str, step: int) -> None:
        living = list(getattr(self._strategy, "living_ranks", ()))
        self._file.write(json.dumps([kind, self._rank, step, living, time.time()]) + "\n")
        self._file.flush()

    def on_train_begin(self, logs: Any = None) -> None:
        """The process is ready to train, or to join."""
        (self._folder / f"pid-{self._rank}").write_text(str(os.getpid()))
        self._note("ready", 0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes the step, and kills this process if it is its turn."""
        step = int(self.model.optimizer.iterations.numpy())
        self._note("step", step)
        living = getattr(self._strategy, "living_ranks", ())
        is_complete = not living or len(living) == self._strategy.num_workers  # that of before has joined
        for at, rank in self._kills:
            mark = self._folder / f"killed-{at}"
            if step >= at and rank == self._rank and is_complete and not mark.exists():
                mark.touch()
                self._note("kill", step)
                os.kill(os.getpid(), signal.SIGKILL)
        if getattr(self._strategy, "living_ranks", True):  # otherwise it repeats a step, and computes no rows
            time.sleep(self._pause)


def main() -> None:
    """Trains as the options in JSON say."""
    from tfdist.callbacks import FailureRecovery
    from tfdist.strategies import MultiWorkerMirroredStrategy

    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    generator = np.random.default_rng(0)
    epochs = math.ceil(options["steps"] / _MOST_STEPS_OF_EPOCH)
    steps = math.ceil(options["steps"] / epochs)
    x = generator.normal(size=(_BATCH * steps, 32)).astype(np.float32)
    strategy = MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = model_of(options["parameters"])
        model.compile(options["optimizer"], "mse")
    callbacks = [Notes(strategy, folder, options["kills"], options["pause_seconds"])]
    if options["saves_every"]:
        callbacks.append(FailureRecovery(folder / "checkpoints", every_steps=options["saves_every"]))
    model.fit(x, x[:, :1], batch_size=_BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    np.savez(folder / f"weights-{strategy.rank}.npz", *model.get_weights())


if __name__ == "__main__":
    main()
