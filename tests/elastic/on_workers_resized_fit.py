"""The program of the workers in `test_elastic_resize.py`: the first one asks for more and for fewer workers.

python on_workers_resized_fit.py FOLDER
"""

import json
import os
import sys
import time
from pathlib import Path

SIZES = (3, 2)  # in turn
SOCKET_VARIABLE = "TEST_CONTROL_SOCKET"
_STEPS = 10  # before each request
_LONGEST_WAIT_SECONDS = 180.0


def main(folder):
    """Trains, and writes what it has computed."""
    import elastic_fits
    import keras
    import numpy as np

    from tfdist.launch.cli.resize_command import request
    from tfdist.strategies import MultiWorkerMirroredStrategy

    strategy = MultiWorkerMirroredStrategy()

    class Requests(keras.callbacks.Callback):
        """Asks for each of the sizes on worker 0, and makes steps slow until as many train."""

        def __init__(self):
            super().__init__()
            self._sizes, self._request_at = list(SIZES), _STEPS
            self._waits_until = time.monotonic() + _LONGEST_WAIT_SECONDS
            self.seen = []

        def on_train_batch_end(self, batch, logs=None):
            step, living = int(self.model.optimizer.iterations.numpy()), list(strategy.living_ranks)
            if living and living not in self.seen[-1:]:
                self.seen.append(living)
            if strategy.rank or not self._sizes or step < self._request_at:
                return
            if step == self._request_at:
                request(Path(os.environ[SOCKET_VARIABLE]), {"workers": self._sizes[0]})
            if len(living) == self._sizes[0]:
                del self._sizes[0]
                self._request_at = step + _STEPS
            elif time.monotonic() < self._waits_until:
                time.sleep(0.5)

    requests = Requests()
    results = elastic_fits.one_leaves(strategy, folder, lambda model: [requests])
    np.savez(folder / f"fit-{strategy.rank}.npz", **results)
    numbers = {"seen": requests.seen, "replicas": int(strategy.num_replicas_in_sync), "workers": strategy.num_workers}
    (folder / f"numbers-{strategy.rank}.json").write_text(json.dumps(numbers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
