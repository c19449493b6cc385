"""A worker of `benchmarks/uneven.py`: trains two models in turns, held to a part of a core after the first steps."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

IMAGE, VECTOR, CLASSES = (32, 32, 3), (64,), 10
_WARM_UP_STEPS = 5
_TURNS_LEFT_OUT = 1  # of the mean step: until the rows are divided


def main() -> None:
    """Trains, and writes the times of the chief."""
    output, steps, turns, batch_size, model, *groups = sys.argv[1:]
    os.nice(-15)  # other programs of the machine must not slow a worker
    config = json.loads(os.environ["TF_CONFIG"])
    rank = config["task"]["index"] + (config["task"]["type"] == "worker" and "chief" in config["cluster"])

    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    from tfdist.strategies import MultiWorkerMirroredStrategy

    trainings = {
        "even": _Training(MultiWorkerMirroredStrategy(), int(batch_size), model),
        "balanced": _Training(MultiWorkerMirroredStrategy(load_balancing=True), int(batch_size), model),
    }
    for training in trainings.values():
        training.take(_WARM_UP_STEPS)  # traces
    Path(groups[rank], "cgroup.procs").write_text(str(os.getpid()))
    for _ in range(int(turns)):
        for training in trainings.values():
            training.take(int(steps))
    if rank == 0:
        measured: dict[str, Any] = {name: training.measured(int(steps)) for name, training in trainings.items()}
        shares = trainings["balanced"].strategy.row_shares
        stats = shares.stats() if shares is not None else ()
        measured["shares"] = [one.share for one in stats]
        measured["divisions"] = trainings["balanced"].divisions
        measured["compute_ms"] = [1e3 * one.seconds / one.steps for one in stats]
        measured["wait_ms"] = [1e3 * one.waited_seconds / one.steps for one in stats]
        Path(output).write_text(json.dumps(measured))


class _Training:
    """A small model that learns to find templates in noise; a step is timed from the end of the previous one.

    Attributes:
        divisions: After how many steps, without the first ones, which trace, the workers have had which shares.
    """

    def __init__(self, strategy: Any, batch_size: int, model: str) -> None:
        import keras
        import numpy as np
        import tensorflow as tf

        self.strategy = strategy
        random = np.random.default_rng(0)
        shape, batches = (IMAGE, 16) if model == "cnn" else (VECTOR, 8)
        labels = random.integers(0, CLASSES, batches * batch_size)
        inputs = (
            random.normal(size=(batches * batch_size, *shape)) + 0.4 * random.normal(size=(CLASSES, *shape))[labels]
        )
        self._data = (
            tf.data.Dataset.from_tensor_slices((inputs.astype("float32"), labels))
            .batch(batch_size, drop_remainder=True)
            .repeat()
        )
        keras.utils.set_random_seed(0)
        with strategy.scope():
            layers: list[Any] = []
            for filters in (16, 32, 64) if model == "cnn" else ():
                layers += [keras.layers.Conv2D(filters, 3, padding="same", activation="relu")]
                layers += [keras.layers.MaxPooling2D(2)] if filters > 16 else []
            for units in (384, 384, 384) if model == "mlp" else ():
                layers += [keras.layers.Dense(units, activation="relu")]
            layers += [keras.layers.Flatten(), keras.layers.Dense(CLASSES)]
            self._model = keras.Sequential([keras.Input(shape), *layers])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self._model.compile(keras.optimizers.Adam(3e-4), loss)
        self.divisions: list[tuple[int, list[float]]] = []
        self._steps = 0
        self._durations: list[list[float]] = []
        self._losses: list[list[float]] = []

    def take(self, steps: int) -> None:
        """Trains. Each turn begins with the same batches; the loss is the mean since the turn began."""
        import keras

        ends: list[float] = []
        losses: list[float] = []

        def note(batch: int, logs: Any) -> None:
            ends.append(time.perf_counter())
            losses.append(float(logs["loss"]))
            if self._durations and self.strategy.row_shares is not None:
                self._steps += 1
                if self._steps % 5:  # to read them takes time
                    return
                shares = [round(one.share, 4) for one in self.strategy.row_shares.stats()]
                if not self.divisions or shares != self.divisions[-1][1]:
                    self.divisions.append((self._steps, shares))

        # The first step of a turn begins with the iterator, so it is trained, but not timed.
        note_end = keras.callbacks.LambdaCallback(on_train_batch_end=note)
        self._model.fit(self._data, steps_per_epoch=steps + 1, verbose=0, callbacks=[note_end])
        self._durations.append([end - begin for begin, end in zip(ends, ends[1:], strict=False)])
        self._losses.append(losses[1:])

    def measured(self, steps: int) -> dict[str, Any]:
        """Returns the mean step of the last turns, and the loss after every fifth step of all.

        Means, because a worker that is held to a part of a core runs and stands in turns.
        """
        counted = [duration for turn in self._durations[1 + _TURNS_LEFT_OUT :] for duration in turn]
        seconds = 0.0
        curve = []
        for turn, losses in zip(self._durations[1:], self._losses[1:], strict=True):
            for start in range(0, steps, 5):
                seconds += sum(turn[start : start + 5])
                curve.append((seconds, losses[min(start + 4, steps - 1)]))
        return {
            "mean_ms": 1e3 * sum(counted) / len(counted),
            "seconds": [round(at, 3) for at, _ in curve],
            "losses": [round(loss, 5) for _, loss in curve],
        }


if __name__ == "__main__":
    main()
