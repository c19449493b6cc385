"""Trainings whose workers train by themselves between two exchanges, and what NumPy computes for the same workers."""

import itertools
import json
import math
import os
from dataclasses import dataclass, field

import keras
import numpy as np

from tfdist.callbacks import GradientAccumulation
from tfdist.strategies import DiLoCo, LocalSGD

EPOCHS, STEPS, BATCH = 4, 80, 24
_RATE, _MOMENTUM = 0.02, 0.9
_INERTIA = 0.99  # of moving means: those of the first epoch count at the end
_OUTER_RATE, _OUTER_MOMENTUM = 0.7, 0.5


def _outer():
    return keras.optimizers.SGD(_OUTER_RATE, momentum=_OUTER_MOMENTUM, nesterov=True)


STRATEGY_OPTIONS = {
    "diloco": {"mode": DiLoCo(sync_every=5, fragments=2, outer_optimizer=_outer, mixing=0.25)},
    "local_sgd": {"mode": LocalSGD(sync_every=7)},
    "local_compressed": {"mode": DiLoCo(sync_every=6, fragments=2, mixing=0.25), "compression": "topk:0.3"},
}


def _data():
    generator = np.random.default_rng(7)
    x = generator.normal(size=(BATCH * STEPS - 7, 12)).astype(np.float32)  # the last batch is smaller
    return x, np.tanh(x @ generator.normal(size=(12, 2))).astype(np.float32)


class Means(keras.layers.Layer):
    """Follows the means of its inputs, as batch normalization does, and passes these on."""

    def __init__(self):
        super().__init__()
        self.normalization = keras.layers.BatchNormalization(momentum=_INERTIA, center=False, scale=False)

    def call(self, inputs, training=False):
        """Returns the inputs."""
        self.normalization(inputs, training=training)
        return inputs


class Members(keras.callbacks.Callback):
    """Notes who has made each step: the workers, the oldest first; none where this worker repeats one.

    The exchange at the end of an epoch is a half step.
    """

    def __init__(self, strategy, folder):
        super().__init__()
        self._strategy, self._write, self._epoch = strategy, strategy.run_writing, 0
        self._file = (folder / f"members-{strategy.rank}-{os.getpid()}.jsonl").open("w", buffering=1)
        strategy.run_writing = self._write_all

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self._note(self._epoch * STEPS + batch + 1)

    def _write_all(self, *arguments):
        self._write(*arguments)
        self._note((self._epoch + 1) * STEPS + 0.5)

    def _note(self, step):
        elastic = self._strategy._elastic
        members = elastic.ranks_by_age if elastic._transactions.trains else []
        self._file.write(json.dumps([step, members]) + "\n")


def _fit(strategy, folder, callbacks, optimizer, layers=list):
    keras.utils.set_random_seed(3)
    x, y = _data()
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((12,)), Means(), *layers(), keras.layers.Dense(2, kernel_initializer="zeros")]
        )
        model.compile(optimizer(), "mse", metrics=["mae"])
    history = model.fit(
        *(x, y, BATCH, EPOCHS),
        verbose=0,
        shuffle=False,
        validation_data=(x[:50], y[:50]),
        callbacks=[Members(strategy, folder), *callbacks(model)],
    )
    weights = {f"weight {index}": weight for index, weight in enumerate(model.get_weights())}
    return {**weights, **history.history, "steps": model.optimizer.iterations.numpy()}


def _momentum():
    return keras.optimizers.SGD(_RATE, momentum=_MOMENTUM)


def diloco(strategy, folder, callbacks):
    """Two fragments, an outer optimizer with momentum, an inner one whose slots are those of a worker."""
    return _fit(strategy, folder, callbacks, _momentum)


def local_sgd(strategy, folder, callbacks):
    """The mean of the weights."""
    return _fit(strategy, folder, callbacks, _momentum)


def local_compressed(strategy, folder, callbacks):
    """What has no reference: equal on all workers. Residuals, averages, statistics, accumulation, a loss scale."""

    def optimizer():
        inner = keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)
        return keras.optimizers.LossScaleOptimizer(inner)

    def layers():
        return [keras.layers.Dense(64, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.1)]

    def with_schedule(model):  # incomplete accumulations are applied at the end of epochs
        return [GradientAccumulation({0: 3, 2: 7}, flush_at_end=True), *callbacks(model)]

    return _fit(strategy, folder, with_schedule, optimizer, layers)


@dataclass
class _Worker:
    """A worker of the reference: kernel and bias with their velocities, moving means, and what it has counted."""

    weights: list
    velocities: list
    samples: list
    means: np.ndarray = field(default_factory=lambda: np.zeros(12))
    sums: np.ndarray = field(default_factory=lambda: np.zeros(3))  # samples, squared and absolute errors

    def train(self, x, y):
        errors = x @ self.weights[0] + self.weights[1] - y
        self.sums += len(x), np.sum(np.mean(errors**2, axis=1)), np.sum(np.mean(np.abs(errors), axis=1))
        slope = 2 * errors / errors.size
        for index, gradient in enumerate([x.T @ slope, slope.sum(axis=0)]):
            self.velocities[index] = _MOMENTUM * self.velocities[index] - _RATE * gradient
            self.weights[index] = self.weights[index] + self.velocities[index]
        self.samples = [number + len(x) for number in self.samples]
        self.means = _INERTIA * self.means + (1 - _INERTIA) * np.mean(x, axis=0)


class Reference:
    """Local updates of workers of which some are lost and some join, in NumPy.

    Args:
        folder: What `Members` has noted.
        mode: How weights are exchanged.

    Attributes:
        members: Who has made each step.
        lost_with_samples: How many workers were lost between two exchanges.
    """

    def __init__(self, folder, mode):
        self.members, self._begins = {}, {}  # by step; the latter has who repeats it first
        for path in sorted(folder.glob("members-*")):
            steps = dict(map(json.loads, path.read_text().splitlines()))
            self._begins.setdefault(min(steps), []).append(int(path.name.split("-")[1]))
            for step, ranks in steps.items():
                if ranks:
                    assert self.members.setdefault(step, ranks) == ranks, "workers do not agree on who trains"
        self._mode, self._fragments = mode, [[0], [1]] if mode.fragments == 2 else [[0, 1]]
        self._anchors, self._outer = self._zeros(), self._zeros()
        self._workers = {rank: _Worker(self._zeros(), self._zeros(), self._no_samples) for rank in self.members[1]}
        self.lost_with_samples = 0

    @staticmethod
    def _zeros():
        return [np.zeros([12, 2]), np.zeros(2)]

    @property
    def _no_samples(self):
        return [0] * self._mode.fragments

    def train(self):
        """Returns the weights, and the logs of `fit`."""
        x, y = (array.astype(np.float64) for array in _data())
        logs = {"loss": [], "mae": [], "val_loss": [], "val_mae": []}
        for epoch in range(EPOCHS):
            for worker in self._workers.values():
                worker.sums = np.zeros(3)
            for batch in range(STEPS):
                rows = slice(batch * BATCH, (batch + 1) * BATCH)
                self._step(epoch * STEPS + batch + 1, batch + 1, x[rows], y[rows])
            self._let_join((epoch + 1) * STEPS + 0.5)
            self._flush(self.members[(epoch + 1) * STEPS + 0.5])
            self._add_logs(logs, sum(worker.sums for worker in self._workers.values()), "")
            evaluated = _Worker(list(self._anchors), self._zeros(), [])
            evaluated.train(x[:50], y[:50])
            self._add_logs(logs, evaluated.sums, "val_")
        means = next(iter(self._workers.values())).means  # equal on all
        return {"weight 0": means, "weight 2": self._anchors[0], "weight 3": self._anchors[1], **logs}

    def _add_logs(self, logs, sums, prefix):
        logs[f"{prefix}loss"].append(sums[1] / sums[0])
        logs[f"{prefix}mae"].append(sums[2] / sums[0])

    def _step(self, step, update, x, y):
        members = sorted(self.members[step])
        for rank in set(self.members.get(step - 1, members)) - set(members):
            self.lost_with_samples += any(self._workers.pop(rank).samples)
        self._let_join(step)
        ends = [(2 * number * len(x) + len(members)) // (2 * len(members)) for number in range(len(members) + 1)]
        for rank, (first, end) in zip(members, itertools.pairwise(ends), strict=True):
            self._workers[rank].train(x[first:end], y[first:end])
        every, count = self._mode.sync_every, self._mode.fragments
        for fragment in range(count):
            if update % every == (fragment + 1) * every // count % every:
                self._exchange(fragment, members, self._mode.kept_share)

    def _let_join(self, step):
        """Gives workers that repeat this step first the state of the oldest one after the step before."""
        for rank in self._begins.get(step, ()) if step > 1 else ():
            donor = self._workers[self.members[math.ceil(step) - 1][0]]
            self._workers[rank] = _Worker([*donor.weights], [*donor.velocities], self._no_samples, donor.means)

    def _flush(self, members):
        if self._mode.kept_share or self._mode.fragments > 1 or STEPS % self._mode.sync_every:
            for fragment in range(self._mode.fragments):
                self._exchange(fragment, members, 0.0)
        means = np.mean([self._workers[rank].means for rank in members], axis=0)
        for worker in self._workers.values():
            worker.samples, worker.means = self._no_samples, means

    def _exchange(self, fragment, members, kept_share):
        """Replaces the weights of all, also of workers that repeat the step, by those of its members."""
        of_members = [self._workers[rank] for rank in members]
        samples = [worker.samples[fragment] for worker in of_members]
        shares = samples if any(samples) else None  # an epoch may end with an exchange
        for index in self._fragments[fragment]:
            anchor = self._anchors[index]
            step = anchor - np.average([worker.weights[index] for worker in of_members], axis=0, weights=shares)
            if isinstance(self._mode, DiLoCo):
                self._outer[index] = _OUTER_MOMENTUM * self._outer[index] - _OUTER_RATE * step
                step = _OUTER_RATE * step - _OUTER_MOMENTUM * self._outer[index]
            self._anchors[index] = anchor - step
            for worker in self._workers.values():
                own = worker.weights[index]
                worker.weights[index] = kept_share * own + (1 - kept_share) * self._anchors[index]
        for worker in of_members:
            worker.samples[fragment] = 0
