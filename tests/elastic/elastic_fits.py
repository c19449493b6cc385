"""Trainings that are the same for one process and for workers of which some are lost."""

import keras
import numpy as np
import tensorflow as tf
from flipped_gradients import FlippedGradients

from tfdist.callbacks import GradientAccumulation, SpikeGuard, WeightComparison
from tfdist.compression import Policy
from tfdist.load_balancing import share_planning
from tfdist.strategies import ElasticLoop, LoadBalancing

STEPS, _BATCH = 80, 24


def _data(seed):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(_BATCH * STEPS - 5, 12)).astype(np.float32)  # the last batch is smaller
    return x, np.tanh(x @ generator.normal(size=(12, 2))).astype(np.float32)


class _Batches(keras.utils.PyDataset):
    """The same rows by a class of Python's, in the same order, read by threads."""

    def __init__(self, x, y):
        super().__init__(workers=2)
        self._x, self._y = x, y

    def __len__(self):
        return -(-len(self._x) // _BATCH)

    def __getitem__(self, index):
        rows = slice(index * _BATCH, (index + 1) * _BATCH)
        return self._x[rows], self._y[rows]


class OwnStep(keras.Sequential):
    """A model with a training step and a metric of its own."""

    def __init__(self, layers):
        super().__init__(layers)
        self.largest = keras.metrics.Mean(name="mean_loss")

    def train_step(self, data):
        """Trains on a batch."""
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.largest.update_state(loss)
        return {"mean_loss": self.largest.result()}

    def test_step(self, data):
        """Evaluates a batch."""
        x, y = data
        self.largest.update_state(self.compute_loss(x, y, self(x, training=False)))
        return {"mean_loss": self.largest.result()}


def _fit(strategy, folder, callbacks, optimizer, layers, *, kind=keras.Sequential, data=None, guards=(), **options):
    keras.utils.set_random_seed(3)
    x, y = _data(5)
    if any(isinstance(guard, SpikeGuard) for guard in guards):
        y[1000] = np.nan  # in one batch of each epoch
    with strategy.scope():
        model = kind([keras.Input((12,)), *layers(), keras.layers.Dense(2)])
        model.compile(optimizer(), "mse", metrics=["mae"], **options)
    monitor = "val_mean_loss" if kind is OwnStep else "val_loss"
    plateau = keras.callbacks.ReduceLROnPlateau(monitor=monitor, mode="min", factor=0.5, patience=0, min_delta=10.0)
    arguments = {"x": x, "y": y, "batch_size": _BATCH} if data is None else {"x": data(x, y)}
    log = keras.callbacks.CSVLogger(str(folder / "log.csv"))
    history = model.fit(
        **arguments,
        epochs=3,
        verbose=0,
        validation_data=(x[:50], y[:50]),
        callbacks=[*guards, plateau, log, *callbacks(model)],
    )
    weights = {f"weight {index}": weight for index, weight in enumerate(model.get_weights())}
    predictions = model.predict(x[:31], batch_size=10, verbose=0)
    return {**weights, **history.history, "predictions": predictions, "steps": model.optimizer.iterations.numpy()}


def chief_is_lost(strategy, folder, callbacks):
    """SGD with momentum, statistics over all replicas, shuffled rows, several steps in one call, accumulation.

    An execution ends within an accumulation of two steps. Weights and gradients are compared.
    """

    def layers():
        return [keras.layers.Dense(16, "tanh"), keras.layers.BatchNormalization(synchronized=True)]

    optimizer = lambda: keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=2)  # noqa: E731
    guards = [WeightComparison(every_steps=10, check_gradients=0.2)]
    return _fit(strategy, folder, callbacks, optimizer, layers, guards=guards, steps_per_execution=3)


def two_are_lost(strategy, folder, callbacks):
    """Adam, a callback that changes the learning rate, gradients clipped by their common norm, and moving shares."""

    def optimizer():
        return keras.optimizers.Adam(0.01, global_clipnorm=0.5)

    def layers():
        # Noise that is too little to matter: it draws from a seed generator.
        return [keras.layers.Dense(16, "gelu"), keras.layers.GaussianNoise(1e-12)]

    return _fit(strategy, folder, callbacks, optimizer, layers)


def one_leaves(strategy, folder, callbacks):
    """Averages of weights, and a batch in each epoch whose loss is not finite."""

    def optimizer():
        return keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9)

    guard = SpikeGuard(deviations=1000.0)
    results = _fit(strategy, folder, callbacks, optimizer, _dense, guards=[guard])
    return {**results, "spikes": [[spike.epoch, spike.batch] for spike in guard.spikes]}


def recovered(strategy, folder, callbacks):
    """Statistics of batch normalization; saved while a worker is missing, and restored on all."""

    def layers():
        return [keras.layers.Dense(16, "tanh"), keras.layers.BatchNormalization(synchronized=True)]

    return _fit(strategy, folder, callbacks, _momentum, layers)


class _Best:
    """What a loop keeps in Python: the least validation loss of an epoch, and all of them."""

    def __init__(self):
        self.losses = []

    def get_state(self):
        """Returns the losses."""
        return self.losses

    def set_state(self, state):
        """Takes the losses of another worker."""
        self.losses = state


def loop(strategy, folder, callbacks, epochs=3):
    """A custom loop with metrics, validation, noise and state in Python, over data that is shuffled in each epoch."""
    keras.utils.set_random_seed(3)
    x, y = _data(5)
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).batch(_BATCH)
    validation = tf.data.Dataset.from_tensor_slices((x[:50], y[:50])).batch(_BATCH)
    with strategy.scope():
        layers = [keras.layers.Dense(16, "tanh"), keras.layers.GaussianNoise(1e-12), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((12,)), *layers])
        model.optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        model.optimizer.build(model.trainable_variables)
        mean, largest = keras.metrics.Mean(), keras.metrics.Mean()
        rate = tf.Variable(1.0, trainable=False)
    best = _Best()
    training = ElasticLoop(strategy, {"model": model, "metrics": [mean, largest], "more": (rate, best)})

    def losses_of(x, y, **options):
        return tf.reduce_mean((y - model(x, **options)) ** 2, axis=1)

    def train_on_replica(x, y):
        with tf.GradientTape() as tape:
            losses = losses_of(x, y, training=True)
            loss = rate * tf.reduce_sum(losses) / _BATCH
        weights = model.trainable_variables
        model.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        mean.update_state(losses)
        return loss

    @training.step
    @tf.function
    def train_step(x, y):
        loss = strategy.reduce("SUM", strategy.run(train_on_replica, args=(x, y)), axis=None)
        rate.assign(rate * 0.999)
        return loss

    @training.step
    @tf.function
    def test_step(x, y):
        strategy.run(lambda x, y: largest.update_state(losses_of(x, y)), args=(x, y))

    followers = callbacks(model)
    last = 0.0
    for epoch in training.epochs(epochs):
        mean.reset_state()
        for callback in followers:
            callback.on_epoch_begin(epoch)
        for batch in training.batches(data):
            last = train_step(*batch)
            for callback in followers:
                callback.on_train_batch_end(training.batch - 1)
        largest.reset_state()
        for batch in training.batches(validation):
            test_step(*batch)
        best.losses.append([float(mean.result()), float(largest.result())])
    weights = {f"weight {index}": weight for index, weight in enumerate(model.get_weights())}
    steps = {"steps": training.steps, "updates": model.optimizer.iterations.numpy(), "rate": rate.numpy()}
    return {**weights, **steps, "losses": best.losses, "last": float(last)}


def epoch_of_loop(strategy, folder, callbacks):
    """The first epoch of `loop`, without a loss. It is the last: who starts again computes earlier ones by itself."""
    return loop(strategy, folder, lambda model: [], epochs=1)


def _momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def _dense():
    return [keras.layers.Dense(16, "tanh")]


# The first one is restored by workers that join a later one.
FITS = {fit.__name__: fit for fit in (recovered, chief_is_lost, two_are_lost, one_leaves, epoch_of_loop)}


def compiled(strategy, folder, callbacks):
    """Compiled by XLA."""
    return _fit(strategy, folder, callbacks, _momentum, _dense, jit_compile=True)


def eager(strategy, folder, callbacks):
    """Step by step in Python."""
    return _fit(strategy, folder, callbacks, _momentum, _dense, run_eagerly=True)


def from_python(strategy, folder, callbacks):
    """Batches of a `PyDataset`, with shuffled order."""
    return _fit(strategy, folder, callbacks, _momentum, _dense, data=_Batches)


def own_step(strategy, folder, callbacks):
    """A training step of the model's own."""
    return _fit(strategy, folder, callbacks, _momentum, _dense, kind=OwnStep)


def compressed(strategy, folder, callbacks):
    """Gradients that are compressed with error feedback: equal on all workers, and not those of one process."""
    return _fit(strategy, folder, callbacks, _momentum, lambda: [keras.layers.Dense(64, "tanh")])


def rounded(strategy, folder, callbacks):
    """Gradients of eight bits: what a worker adds up for the others must not be missing when it is lost."""
    return _fit(strategy, folder, callbacks, _momentum, lambda: [keras.layers.Dense(64, "tanh")])


def preempted(strategy, folder, callbacks):
    """All are asked to leave, and started again."""
    return _fit(strategy, folder, callbacks, _momentum, _dense)


def on_a_store(strategy, folder, callbacks):
    """Checkpoints are objects; some steps after a worker was lost and has joined, all are lost."""
    return _fit(strategy, folder, callbacks, _momentum, _dense)


wrong_workers: set[int] = set()  # whose gradients are wrong in `wrong_gradients`


def wrong_gradients(strategy, folder, callbacks):
    """Gradients of one worker become wrong where they are compared."""

    def layers():
        flips = FlippedGradients(lambda device: strategy.rank in wrong_workers)
        return [keras.layers.Dense(16, "tanh"), keras.layers.Dropout(1e-12), flips]

    return _fit(
        strategy, folder, callbacks, _momentum, layers, guards=[WeightComparison(every_steps=10, check_gradients=0.3)]
    )


def accumulated(strategy, folder, callbacks):
    """Accumulates with a loss scale; an execution ends within an accumulation."""

    def optimizer():
        inner = keras.optimizers.Adam(0.01, global_clipnorm=0.5, gradient_accumulation_steps=7)
        return keras.optimizers.LossScaleOptimizer(inner)

    def layers():
        return [keras.layers.Dense(16, "gelu"), keras.layers.BatchNormalization(synchronized=True)]

    return _fit(strategy, folder, callbacks, optimizer, layers, steps_per_execution=3)


def accumulated_eagerly(strategy, folder, callbacks):
    """Step by step in Python."""
    optimizer = lambda: keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=7)  # noqa: E731
    return _fit(strategy, folder, callbacks, optimizer, _dense, run_eagerly=True)


def accumulated_by_a_callback(strategy, folder, callbacks):
    """A schedule: incomplete accumulations are applied where an epoch changes the number of steps, and at the end."""

    def with_schedule(model):
        return [GradientAccumulation({0: 3, 1: 7, 2: 9}, flush_at_end=True), *callbacks(model)]

    return _fit(strategy, folder, with_schedule, _momentum, _dense)


def compressed_loop(strategy, folder, callbacks):
    """A custom loop with factors and residuals of compressors."""
    return loop(strategy, folder, callbacks)


MORE_FITS = {
    fit.__name__: fit
    for fit in (
        compiled,
        eager,
        from_python,
        own_step,
        loop,
        compressed,
        compressed_loop,
        rounded,
        wrong_gradients,
        accumulated,
        accumulated_eagerly,
        accumulated_by_a_callback,
    )
}
STRATEGY_OPTIONS = {
    "two_are_lost": {"load_balancing": LoadBalancing(every_steps=1)},
    "compressed": {"compression": {"dense/kernel": "powersgd:2", ".*": "topk:0.2"}},
    "compressed_loop": {"compression": Policy({"dense.*/kernel": "powersgd:2", ".*": "topk:0.2"}, dense_below=0)},
    "rounded": {"compression": "int8"},
}


def skip(strategy):
    """Calls `fit` in place of a training that the other workers have completed; tracing would take longer."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=strategy.local_updates is None)
    model.fit(np.ones([3, 1]), np.ones([3, 1]), verbose=0)


def move_shares():
    """Replaces the plan of this process: shares move after each step, by what is the same on all workers."""
    plan = share_planning.after_step

    def after_step(state, seconds, rows, interval, devices, options, **units):
        state = plan(state, seconds, rows, interval, devices, options, **units)
        if options is not None:
            living = np.flatnonzero(state[share_planning.SHARE])
            samples = int(state[share_planning.ROWS].sum())  # a lost worker, and one that joins, have not reported all
            state[share_planning.SHARE, living] = [1 + (samples // 5 + 7 * rank) % 11 for rank in living]
            state[share_planning.PLANNED_SHARE] = state[share_planning.SHARE]
        return state

    share_planning.after_step = after_step
