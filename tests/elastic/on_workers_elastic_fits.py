"""The program of the workers in `test_elastic_on_workers.py`: trainings during which workers are lost and join again.

python on_workers_elastic_fits.py FOLDER [NAME]     one of `MORE_FITS`, on two devices a worker
"""

import functools
import os
import signal
import sys
import time
from pathlib import Path

# By training: the rank that is lost, the step after which it is, and the signal.
FAULTS = {
    "chief_is_lost": [(0, 100, signal.SIGKILL)],
    "two_are_lost": [(1, 60, signal.SIGKILL), (2, 60, signal.SIGKILL)],
    "one_leaves": [(1, 90, signal.SIGTERM)],
    "compiled": [(0, 60, signal.SIGKILL)],
    "eager": [(1, 60, signal.SIGKILL)],
    "from_python": [(2, 60, signal.SIGKILL)],
    "own_step": [(0, 60, signal.SIGKILL)],
    "compressed": [(1, 60, signal.SIGKILL)],
    "rounded": [(1, 60, signal.SIGKILL)],
}
_LONGEST_WAIT_SECONDS = 120.0


def main(folder, name=None):
    """Trains, is lost, and writes what it has computed."""
    import elastic_fits
    import keras
    import numpy as np
    import tensorflow as tf

    from tfdist.strategies import MultiWorkerMirroredStrategy

    if name is not None:
        devices = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)

    class Faults(keras.callbacks.Callback):
        """Loses this worker once, and makes steps slow until all that were lost have joined."""

        def __init__(self, name, strategy, model):
            super().__init__()
            self._name, self._strategy, self._trained = name, strategy, model
            self._waits_until = time.monotonic() + _LONGEST_WAIT_SECONDS

        def on_train_batch_end(self, batch, logs=None):
            step = int(self._trained.optimizer.iterations.numpy())
            strategy = self._strategy
            living = strategy.living_ranks
            is_complete = len(living) == strategy.num_workers
            for rank, at, number in FAULTS[self._name]:
                mark = folder / f"{self._name}-{rank}.lost"
                if rank == strategy.rank and step >= at and is_complete and not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), number)
            if living and not is_complete and time.monotonic() < self._waits_until:
                time.sleep(0.25 * self._trained.steps_per_execution)

    fits = elastic_fits.FITS if name is None else {name: elastic_fits.MORE_FITS[name]}
    for name, fit in fits.items():
        print(f"training: {name}", flush=True)
        own = folder / name
        own.mkdir(exist_ok=True)
        strategy = MultiWorkerMirroredStrategy(**elastic_fits.STRATEGY_OPTIONS.get(name, {}))
        faults = functools.partial(Faults, name, strategy)
        results = fit(strategy, own, lambda model, faults=faults: [faults(model)])
        if strategy.living_ranks:  # one that is started again computes earlier trainings by itself
            np.savez(folder / f"{name}-{strategy.rank}.npz", **results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
