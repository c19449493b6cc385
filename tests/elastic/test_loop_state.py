"""What a custom loop trains: what is found, refused, sent and taken over."""

import contextlib
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.collectives import CompressionState
from tfdist.elastic.loop_member import LoopMember
from tfdist.elastic.loop_state import LoopState
from tfdist.elastic.received_state import ReceivedState, encode_state
from tfdist.elastic.step_transactions import WrittenVariables
from tfdist.elastic.step_variables import variables_of_steps
from tfdist.keras_internals.seed_generators import forget_global_seed_generator, global_seed_generator
from tfdist.strategies import ElasticLoop, MirroredStrategy
from tfdist.training.metric_totals import MetricTotals

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.fixture(autouse=True)
def no_global_generator():
    yield
    forget_global_seed_generator()


class Python:
    def __init__(self):
        self.state = None

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def state_of(objects, totals=None, *, strategy=None):
    strategy = strategy or SimpleNamespace(
        scope=contextlib.nullcontext,
        num_replicas_in_sync=1,
        compression_state=CompressionState(),
        rank=1,
        extended=SimpleNamespace(worker_devices=("CPU:0",)),
    )
    return LoopState(objects, strategy, totals or MetricTotals(), lambda tensor: 2 * tensor)


def model_of(*layers):
    return keras.Sequential([keras.Input((2,)), *layers])


def built(optimizer, model):
    optimizer.build(model.trainable_variables)
    return optimizer


def test_variables_of_all_objects_are_found_once():
    model = model_of(keras.layers.Dropout(0.5), keras.layers.Dense(1))
    adam, metric, generator = (
        built(keras.optimizers.Adam(), model),
        keras.metrics.Mean(),
        tf.random.Generator.from_seed(1),
    )
    more = tf.Variable(1.0)
    found = state_of([model, {"a": adam, "b": (metric, generator, more)}, adam, model.layers[-1]]).variables
    assert len(found) == len(set(map(id, found)))
    for variable in [*model.variables, *adam.variables, *metric.variables]:
        assert any(one is variable.value for one in found), variable.path
    assert any(one is generator.state for one in found) and any(one is more for one in found)
    assert any(one is model.layers[0].seed_generator.state.value for one in found)


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        (lambda: 3.0, r"Received: 3.0 \(1\). Expected: models, layers"),
        (lambda: keras.optimizers.SGD(), "Received: SGD, which is not built"),
        (lambda: keras.Sequential([keras.layers.Dense(1)]), "'sequential.*' .1., which is not built"),
        (lambda: model_of(keras.layers.BatchNormalization()), "with a BatchNormalization that normalizes by the rows"),
        (
            lambda: built(keras.optimizers.SGD(gradient_accumulation_steps=2), model_of(keras.layers.Dense(1))),
            "accumulates over 2 micro-steps",
        ),
    ],
)
def test_what_cannot_be_taken_over_is_refused(objects, message):
    with pytest.raises(ValueError, match=message) as raised:
        state_of([tf.Variable(0), objects()])
    assert "Expected: " in str(raised.value)


def test_another_worker_takes_over_all_but_its_counts_and_residuals(cpus):
    def objects():
        strategy = MirroredStrategy(cpus[:2], compression="powersgd:1")
        with strategy.scope():
            model = model_of(keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(4096, use_bias=False))
            return strategy, [model, built(keras.optimizers.SGD(), model), keras.metrics.Sum(), Python()]

    (strategy, ours), (other, theirs), totals = objects(), objects(), MetricTotals()
    giver = state_of(ours, totals, strategy=strategy)

    @tf.function
    def step():
        ours[0].layers[0](tf.ones([1, 2]), training=True)
        weight = ours[0].trainable_variables[0]
        ours[1].apply_gradients([(tf.random.stateless_normal([2, 4096], [1, 2]), weight)])
        ours[2].update_state(3.0)

    strategy.run(step)
    ours[3].state = {"best": [0.5, np.arange(3)]}
    giver.store_metrics()
    keras.random.normal([1])  # from the global generator
    drawn = global_seed_generator().state.numpy()
    parts = [part if isinstance(part, bytes) else part.tobytes() for part in encode_state(giver.snapshot(), {})]
    received = ReceivedState([bytearray(part) for part in parts], 2)
    forget_global_seed_generator()
    taken = MetricTotals()
    taker = state_of(theirs, taken, strategy=other)
    theirs[2].update_state(100.0)
    taker.restore(received, 0, giver.sums_of_metrics())
    np.testing.assert_array_equal(global_seed_generator().state, drawn)
    for one, other_one in zip(
        ours[0].variables + ours[1].variables, theirs[0].variables + theirs[1].variables, strict=True
    ):
        np.testing.assert_array_equal(one, other_one)
    assert theirs[3].state["best"][0] == 0.5 and theirs[3].state["best"][1].tolist() == [0, 1, 2]
    assert float(theirs[2].result()) == 0.0 and float(taken.of(theirs[2].variables)[0]) == 12.0
    for replica, taken_over in zip(
        *(one.compression_state.replicas.values() for one in (strategy, other)), strict=True
    ):
        (entries,), (others,) = replica.entries.values(), taken_over.entries.values()
        assert entries.keys() == others.keys() and np.any(entries["residual"])
        for name, value in entries.items():
            np.testing.assert_array_equal(others[name], np.zeros_like(value) if name == "residual" else value)


def test_sums_of_metrics_are_forgotten_when_the_program_resets_them():
    metric, totals = keras.metrics.Mean(), MetricTotals()
    state = state_of(metric, totals)
    metric.update_state([1.0, 2.0])
    state.store_metrics()
    assert [float(total) for total in totals.of(metric.variables)] == [6.0, 4.0]
    metric.reset_state()
    totals.divide(is_first=True)
    assert [float(variable) for variable in metric.variables] == [0.0, 0.0]


def test_variables_that_a_metric_creates_in_a_step_are_known_in_the_next():
    class Late(keras.metrics.Metric):
        def update_state(self, value):
            if not self.variables:
                self.total = self.add_variable((), "zeros", name="total")
            self.total.assign_add(value)

        def result(self):
            return self.total

        def reset_state(self):
            pass

    metric, totals = Late(), MetricTotals()
    state = state_of(metric, totals)
    state.store_metrics()
    assert not state.variables
    metric.update_state(3.0)
    state.store_metrics()
    assert [float(variable) for variable in state.variables] == [3.0]
    assert [float(total) for total in totals.of(metric.variables)] == [6.0]


def test_large_metrics_are_not_summed():
    metric, totals = keras.metrics.MeanIoU(200), MetricTotals()
    state = state_of(metric, totals)
    state.store_metrics()
    assert len(state.variables) == 1 and totals.of(metric.variables) == [None]


def test_all_workers_get_the_values_of_the_oldest():
    variable, metric = tf.Variable([1.0, 2.0]), keras.metrics.Sum()
    metric.update_state(3.0)
    state_of([variable, metric]).equalize(lambda value: 10 * value)
    assert variable.numpy().tolist() == [10.0, 20.0] and float(metric.result()) == 3.0


def test_the_global_generator_of_keras_is_taken_back(cpus):
    strategy = MirroredStrategy(cpus[:2])
    with strategy.scope():
        model = model_of(keras.layers.Dense(1))
        model.compile("sgd", "mse")
        keras.random.normal([1])
    written = WrittenVariables(lambda: variables_of_steps(model))
    before, seed = written.read(), global_seed_generator().state.numpy()
    keras.random.normal([1])
    written.take_back(before)
    np.testing.assert_array_equal(global_seed_generator().state, seed)


def test_without_elastic_a_loop_calls_its_functions(cpus):
    strategy = MirroredStrategy(cpus[:1])
    loop = ElasticLoop(strategy, [keras.optimizers.SGD()])
    step, seen = loop.step(lambda batch: batch.numpy().tolist()), []
    data = tf.data.Dataset.range(6).batch(2)
    for epoch in loop.epochs(2):
        for batch in loop.batches(data, steps=2):
            seen.append((epoch, loop.epoch, step(batch)))
        for batch in loop.batches(data):
            seen.append(step(batch))
            break
    assert seen == [(0, 0, [0, 1]), (0, 0, [2, 3]), [0, 1], (1, 1, [0, 1]), (1, 1, [2, 3]), [0, 1]]
    assert loop.steps == 6
    with pytest.raises(ValueError, match="Received: a second call of `epochs`"):
        next(loop.epochs(1))
    with pytest.raises(ValueError, match="Received: list. Expected: a tf.data.Dataset"):
        next(loop.batches([1, 2]))
    assert next(loop.batches(strategy.experimental_distribute_dataset(data))).numpy().tolist() == [0, 1]


def test_a_step_within_a_function_is_refused():
    transactions = SimpleNamespace(group=None, is_running=False)
    options = {"others": tuple, "overwritten": tuple, "take_no_rows": None, "share_metrics": None}
    step = LoopMember(transactions, state_of([]), **options).step(tf.identity)
    with pytest.raises(ValueError, match="Received: a call of 'identity' within a `tf.function`"):
        tf.function(step)(tf.constant(1))
