"""Cases of `Synchronous`, compared with one process on the complete batch."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import cases as parity
import data_cases  # noqa: F401
import keras
import loss_cases  # noqa: F401
import metric_cases  # noqa: F401
import model_cases
import numpy as np
import optimizer_cases  # noqa: F401
import tensorflow as tf
from cluster_cases import (
    INPUTS,
    LABELS,
    LONG_PARITY,
    PARITY,
    Outcome,
    case,
    compared,
    compiled,
    in_one_process,
)
from comparison import largest_difference

from tfdist.keras_internals import compiled_calls
from tfdist.load_balancing.share_planning import row_bounds
from tfdist.parameter_server.batch_split import PartShares
from tfdist.strategies import LoadBalancing, ParameterServerStrategy, Synchronous
from tfdist.tensorflow_internals import cluster_coordinator

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


def synchronous(**arguments: Any) -> Any:
    return ParameterServerStrategy(mode=Synchronous(), **arguments)


for _name in PARITY + LONG_PARITY:
    compared(_name, synchronous, parity.CASES[_name].run, parity.CASES[_name].reference)

OPTIMIZERS = {
    "momentum": lambda: SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.8), momentum=0.9, clipnorm=0.3),
    "adam": lambda: Adam(0.01),
}


def _rounds(optimizer: Any, batch_size: int) -> Any:
    """20 batches of 21 rows, the last of each epoch smaller."""

    def program(strategy: Any) -> Outcome:
        model = compiled(strategy, optimizer)
        data = {"batch_size": batch_size, "shuffle": False, "validation_data": (INPUTS[:50], LABELS[:50])}
        history = model.fit(INPUTS, LABELS, epochs=2, verbose=0, **data)
        updates = int(model.optimizer.iterations.numpy())
        return {"weights": model.get_weights(), "logs": history.history, "updates": updates}

    return program


for _name, _steps in (("momentum", 2), ("adam", 1)):
    compared(
        f"{_name}_{_steps}",
        lambda steps=_steps: synchronous(gradient_accumulation_steps=steps),
        _rounds(OPTIMIZERS[_name], 21),
        _rounds(OPTIMIZERS[_name], 21 * _steps),
    )


class _MovingParts(PartShares):
    """Parts whose sizes change after every round, in a fixed order."""

    ORDER = ([2, 1], [0, 1], [1, 2])
    rounds, computed = 0, [0, 0]

    def sizes(self, rows: int) -> list[int]:
        bounds = row_bounds(self.ORDER[self.rounds % 3], rows)
        sizes = [bounds[1], rows - bounds[1]]
        self.computed = [before + size for before, size in zip(self.computed, sizes, strict=True)]
        return sizes

    def add_round(self, interval: float, measured: Any) -> None:
        super().add_round(interval, measured)
        self.rounds += 1


@case
def moving_parts(_: Path) -> Outcome:
    """The worker for which a part was made computes it, unless it is lost."""
    strategy = synchronous(load_balancing=LoadBalancing(every_steps=3))
    strategy.part_shares = shares = _MovingParts(2, LoadBalancing(every_steps=3))
    program = _rounds(OPTIMIZERS["momentum"], 21)
    limit = cluster_coordinator._SECONDS_FOR_PREFERRED
    cluster_coordinator._SECONDS_FOR_PREFERRED = 600.0  # a busy host may be late in every round
    try:
        outcome = program(strategy)
    finally:
        cluster_coordinator._SECONDS_FOR_PREFERRED = limit
    difference = largest_difference(outcome, in_one_process(program))
    samples = [stats.samples for stats in strategy.worker_stats]
    return {"difference": difference, "samples": samples, "expected": shares.computed, "rounds": shares.rounds}


def _constrained() -> keras.Model:
    keras.utils.set_random_seed(1)
    constraint = keras.constraints.MaxNorm(0.9)
    layers = [keras.layers.Dense(8, "tanh", kernel_constraint=constraint), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((6,)), *layers])


def _with_all_features() -> Any:
    decayed = SGD(0.1, momentum=0.9, weight_decay=0.05, global_clipnorm=0.3, use_ema=True, ema_overwrite_frequency=3)
    return keras.optimizers.LossScaleOptimizer(decayed, initial_scale=2.0**10, dynamic_growth_steps=3)


def _features(strategy: Any) -> Outcome:
    """Constraints, moving averages, loss scale, weight decay and clipping in one optimizer."""
    model = compiled(strategy, _with_all_features, _constrained)
    history = model.fit(INPUTS[:84], LABELS[:84], batch_size=21, epochs=2, shuffle=False, verbose=0)
    scale = float(model.optimizer.dynamic_scale.numpy())
    return {"weights": model.get_weights(), "logs": history.history, "scale": scale}


compared("optimizer_features", synchronous, _features)


def _of_two_parts(strategy: Any) -> Outcome:
    model_cases._PartwiseBatchNormalization.parts = 2
    return model_cases._normalized(strategy, model_cases._PartwiseBatchNormalization)


compared(
    "batch_normalization",  # normalizes by part; the moving statistics get the mean of the parts
    synchronous,
    lambda strategy: model_cases._normalized(strategy, keras.layers.BatchNormalization),
    _of_two_parts,
)


class _OwnFunction(keras.layers.Layer):
    """Reads its weight in a `tf.function`, whose trace keeps what it reads, and a plain variable of a server."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))
        self.plain = tf.Variable(0.5)
        self.function = tf.function(lambda inputs: inputs @ self.kernel)

    def call(self, inputs: Any) -> Any:
        return self.function(inputs) * self.plain


def _with_layers_of_all_kinds() -> keras.Model:
    """Rows of servers, statistics that a step changes, seeds of dropout, masks."""
    keras.utils.set_random_seed(1)
    tokens = keras.Input((5,), dtype="int32")
    rows = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(20, 8, mask_zero=True)(tokens))
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(8, "gelu")(rows))
    inner = keras.Sequential([keras.Input((8,)), keras.layers.Dropout(0.3, seed=5), keras.layers.Dense(3)])
    return keras.Model(tokens, inner(_OwnFunction()(hidden)))


@case
def compiled_by_xla(_: Path) -> Outcome:
    """With XLA and without, under servers both."""
    calls, call_compiled = [], compiled_calls.call_compiled
    tokens, outcomes = (np.abs(INPUTS[:80, :5]) * 9).astype("int32") % 20, []

    def counted(*arguments: Any) -> Any:
        calls.append(call_compiled(*arguments))
        return calls[-1]

    compiled_calls.call_compiled = counted
    try:
        for jit_compile in (True, False):
            model = compiled(synchronous(), lambda: Adam(0.01), _with_layers_of_all_kinds, jit_compile=jit_compile)
            history = model.fit(tokens, LABELS[:80], batch_size=20, epochs=2, shuffle=False, verbose=0)
            outcomes.append({"weights": model.get_weights(), "logs": history.history})
    finally:
        compiled_calls.call_compiled = call_compiled
    return {"difference": largest_difference(*outcomes), "calls": sum(call is not None for call in calls)}


def _custom_step(strategy: Any) -> Outcome:
    metrics = lambda: None  # noqa: E731
    arguments: Any = {"model": model_cases.CustomStep, "data": parity.dataset(23), "metrics": metrics}
    outcome = parity.fitted(strategy, lambda: Adam(0.01, clipnorm=0.1), **arguments)
    del outcome["logs"]["mean"]  # not a metric: of the epoch's last part
    return outcome


compared("custom_train_step", synchronous, _custom_step)


class _Recorder(keras.callbacks.Callback):
    """Records every call of a callback, with its number and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_") or name in ("on_batch_begin", "on_batch_end"):
            return super().__getattribute__(name)

        def call(number: Any = None, logs: Any = None) -> None:
            number, logs = (None, number) if isinstance(number, dict) else (number, logs)
            self.calls.append([name, -1 if number is None else number, dict(logs or {})])

        return call


def _callbacks(strategy: Any) -> list[Any]:
    recorder = _Recorder()
    metrics = lambda: ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)]  # noqa: E731
    model = compiled(strategy, lambda: Adam(0.05), metrics=metrics)
    stop = keras.callbacks.EarlyStopping("val_loss", min_delta=10.0, patience=1)
    data = {"batch_size": 60, "shuffle": False, "validation_split": 0.3}
    model.fit(INPUTS, LABELS, epochs=9, verbose=0, callbacks=[recorder, stop], **data)
    return recorder.calls


@case
def callbacks(_: Path) -> Outcome:
    """Compares the calls of a callback: order, numbers and logs, without the logs of evaluated batches."""
    ours, reference = _callbacks(synchronous()), in_one_process(_callbacks)
    logs = [[logs for name, _, logs in calls if "test_batch" not in name] for calls in (ours, reference)]
    orders = [[f"{name} {number}" for name, number, _ in calls] for calls in (ours, reference)]
    return {"difference": largest_difference(*logs), "same": orders[0] == orders[1], "order": orders[0]}


def _mixed() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(16, "relu", dtype="mixed_float16"), keras.layers.Dense(3, dtype="mixed_float16")]
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Activation("linear", dtype="float32")])


def _overflows(strategy: Any) -> list[float]:
    """A loss scale whose first value overflows float16."""
    optimizer = lambda: keras.optimizers.LossScaleOptimizer(SGD(0.1), initial_scale=2.0**20)  # noqa: E731
    model = compiled(strategy, optimizer, _mixed)
    history = model.fit(INPUTS, LABELS, batch_size=21, epochs=2, shuffle=False, verbose=0).history
    updates = int(model.optimizer.iterations.numpy())
    return [updates, float(model.optimizer.dynamic_scale.numpy()), *history["loss"]]


@case
def mixed_float16(_: Path) -> Outcome:
    rounds = synchronous()
    found = [_overflows(rounds), in_one_process(_overflows)]
    return {"found": found, "communication": asdict(rounds.communication)}
