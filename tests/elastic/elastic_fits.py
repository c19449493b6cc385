"""Trainings that are the same for one process and for workers of which some are lost."""

import keras
import numpy as np

_STEPS, _BATCH = 80, 24


def _data(seed):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(_BATCH * _STEPS - 5, 12)).astype(np.float32)  # the last batch is smaller
    return x, np.tanh(x @ generator.normal(size=(12, 2))).astype(np.float32)


def _fit(strategy, folder, callbacks, optimizer, layers, **options):
    keras.utils.set_random_seed(3)
    x, y = _data(5)
    with strategy.scope():
        model = keras.Sequential([keras.Input((12,)), *layers(), keras.layers.Dense(2)])
        model.compile(optimizer(), "mse", metrics=["mae"], **options)
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=0, min_delta=10.0)
    log = keras.callbacks.CSVLogger(str(folder / "log.csv"))
    history = model.fit(
        x,
        y,
        batch_size=_BATCH,
        epochs=3,
        verbose=0,
        validation_data=(x[:50], y[:50]),
        callbacks=[plateau, log, *callbacks(model)],
    )
    weights = {f"weight {index}": weight for index, weight in enumerate(model.get_weights())}
    predictions = model.predict(x[:31], batch_size=10, verbose=0)
    return {**weights, **history.history, "predictions": predictions, "steps": model.optimizer.iterations.numpy()}


def chief_is_lost(strategy, folder, callbacks):
    """SGD with momentum, statistics over all replicas, shuffled rows, several steps in one call."""

    def layers():
        return [keras.layers.Dense(16, "tanh"), keras.layers.BatchNormalization(synchronized=True)]

    optimizer = lambda: keras.optimizers.SGD(0.05, momentum=0.9)  # noqa: E731
    return _fit(strategy, folder, callbacks, optimizer, layers, steps_per_execution=3)


def two_are_lost(strategy, folder, callbacks):
    """Adam, a callback that changes the learning rate, and gradients clipped by their common norm."""

    def optimizer():
        return keras.optimizers.Adam(0.01, global_clipnorm=0.5)

    return _fit(strategy, folder, callbacks, optimizer, lambda: [keras.layers.Dense(16, "gelu")])


def one_leaves(strategy, folder, callbacks):
    """Averages of weights."""

    def optimizer():
        return keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9)

    return _fit(strategy, folder, callbacks, optimizer, lambda: [keras.layers.Dense(16, "tanh")])


FITS = {fit.__name__: fit for fit in (chief_is_lost, two_are_lost, one_leaves)}
