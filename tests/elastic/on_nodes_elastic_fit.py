"""The program of the workers in `test_elastic_on_nodes.py`: a training whose hosts are lost one after the other.

python on_nodes_elastic_fit.py FOLDER
"""

import sys
import time
from pathlib import Path

WORKERS = 3
_LONGEST_WAIT_SECONDS = 300.0


def main(folder):
    """Trains, and writes what it has computed. It makes steps slow until the test has written `all-have-joined`."""
    import elastic_fits
    import keras
    import numpy as np

    from tfdist.strategies import MultiWorkerMirroredStrategy

    strategy = MultiWorkerMirroredStrategy()

    class Pace(keras.callbacks.Callback):
        """Says who trains, and waits."""

        def __init__(self):
            super().__init__()
            self._living, self._waits_until = (), time.monotonic() + _LONGEST_WAIT_SECONDS

        def on_train_batch_end(self, batch, logs=None):
            living = strategy.living_ranks
            if living and living != self._living:
                self._living = living
                print("living:", *living, flush=True)
            if living and not (folder / "all-have-joined").exists() and time.monotonic() < self._waits_until:
                time.sleep(0.7)

    results = elastic_fits.one_leaves(strategy, folder, lambda model: [Pace()])
    np.savez(folder / f"fit-{strategy.rank}.npz", **results)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
