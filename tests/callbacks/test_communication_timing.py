"""CommunicationReport with `timing=True`: durations of encoding, exchange and decoding."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from dense_model import compiled
from report_runs import SECONDS, fit, silent, watch

from tfdist.callbacks import GradientAccumulation
from tfdist.collectives.exchange_timer import ExchangeTimer
from tfdist.compression import Policy, TopK
from tfdist.strategies import MirroredStrategy


def embedding(strategy):
    """Sparse and dense gradients."""
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Embedding(50, 4), keras.layers.Flatten(), keras.layers.Dense(48)]
        )
        model.compile(keras.optimizers.SGD(0.1), loss="mse", steps_per_execution=2)
    return model


@pytest.mark.parametrize(
    ("make", "rules", "micro_steps"),
    [
        pytest.param(compiled, {"kernel": "powersgd:2", "": None}, 2, marks=pytest.mark.long),
        (embedding, {"embedding": TopK(0.1), "": "int8"}, 1),
    ],
    ids=["accumulated", "sparse, in a loop"],
)
def test_times_are_taken_and_nothing_else_changes(cpus, make, rules, micro_steps, monkeypatch):
    kinds, weights, tables = {}, [], []
    spend = ExchangeTimer.add_elapsed
    monkeypatch.setattr(
        ExchangeTimer, "add_elapsed", lambda *a: kinds.setdefault(id(a[1]), []).append(a[2]) or spend(*a)
    )
    for timing in (False, True):
        # A warm-up is a condition around collectives, accumulation another one.
        model = make(MirroredStrategy(cpus[:2], compression=Policy(rules, dense_steps=1, dense_below=64)))
        report = silent(timing=timing)
        history = fit(model, GradientAccumulation(micro_steps), report)
        weights.append(model.get_weights())
        rows = [line.rsplit(maxsplit=8 if timing else 5) for line in report.table().splitlines()]
        tables.append([row for row in rows[3:] if len(row) > 1])
    for one, other in zip(*weights, strict=True):
        np.testing.assert_array_equal(one, other)
    assert all(min(history[name]) > 0 for name in SECONDS)
    milliseconds = np.array([row[-3:] for row in tables[1]], dtype=float)
    assert len(milliseconds) == 3 and (milliseconds[:, 1] > 0).all()
    np.testing.assert_allclose(milliseconds[:2].sum(axis=0), milliseconds[2], atol=0.0016)  # rounded to 0.001 each
    np.testing.assert_allclose([history[name][0] * 1e3 for name in SECONDS], milliseconds[2], atol=0.00051)
    assert [row[:-3] for row in tables[1]] == tables[0]
    assert len(kinds) == 2
    for of_bucket in kinds.values():
        *collectives, last = of_bucket
        assert last == 2 and collectives == [0, 1] * (len(collectives) // 2), "encode, exchange, ..., decode"


def test_without_timing_no_clock_is_in_the_graph(cpus, monkeypatch):
    clocks, stopwatches, timestamp = [], [], tf.timestamp
    monkeypatch.setattr(tf, "timestamp", lambda *a, **k: clocks.append(k) or timestamp(*a, **k))
    strategy = MirroredStrategy(cpus[:2], compression="int8")
    model = compiled(strategy)
    fit(model, silent())
    assert not clocks
    reduction = strategy.gradient_reduction
    fit(
        model, silent(timing=True), watch(stopwatches, lambda _: reduction._timer, "on_epoch_end")
    )  # traces a traced model again
    assert len(clocks) == 4, "the first replica's only bucket: its start, a collective's start and end, its end"
    assert strategy.gradient_reduction.durations_by_method() == {}
    taken = stopwatches[0].by_label()
    logs = fit(model, silent())
    assert stopwatches[0].by_label() == taken and len(clocks) == 4
    assert not set(SECONDS) & set(logs)
