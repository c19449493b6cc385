"""A worker that joins traces its training step while the state is on its way, where that changes nothing."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.data_position.resumable_iterator import patch_epoch_iterator, training_iterator
from tfdist.elastic.elastic_fit import ElasticFit
from tfdist.elastic.step_transactions import NOTHING, StepTransactions
from tfdist.exchange.channel import Channel
from tfdist.exchange.exchange_errors import GroupFailure
from tfdist.exchange.result_log import LoggedChannel, ReplayError, ResultLog
from tfdist.keras_internals.model_introspection import trace_step
from tfdist.strategies import MirroredStrategy
from tfdist.tensorflow_internals.function_graphs import create_kernels

pytestmark = pytest.mark.usefixtures("cpus")


class Traced(keras.Sequential):
    """A model that notes the shapes that its step sees on each replica when it is traced."""

    def __init__(self, layers):
        super().__init__(layers)
        self.shapes = []

    def train_step(self, data):
        self.shapes.append(data[0].shape.as_list())
        return super().train_step(data)


def _model(cpus, **options):
    with MirroredStrategy(cpus[:2]).scope():
        model = Traced([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", **options)
    return model


class _Traces(keras.callbacks.Callback):
    """Traces where a worker that joins does."""

    def on_train_begin(self, logs=None):
        before = [weight.copy() for weight in self.model.get_weights()]
        trace_step(self.model.train_function, training_iterator(self.model).element_spec)
        self.traced = len(self.model.shapes)
        for weight, value in zip(self.model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(weight, value, "tracing has run it")


def _fit(model, traces):
    patch_epoch_iterator()
    x = np.ones([20, 3], np.float32)
    model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=[traces])


def test_the_graph_that_is_traced_before_the_first_batch_is_that_of_all_batches(cpus):
    model, traces = _model(cpus), _Traces()
    _fit(model, traces)
    assert traces.traced == 2, "the step is traced for both replicas"
    assert model.shapes == [[None, 3]] * 2, "it is traced once"
    assert model.optimizer.iterations.numpy() == 6


def test_kernels_are_created_and_nothing_runs(cpus):
    counter = tf.Variable(0)

    def create(operation):
        @tf.function
        def step(batch):
            counter.assign_add(1)
            return tf.reduce_sum(batch["x"]), operation()

        spec = {"x": tf.TensorSpec([None, 3], tf.float32), "name": tf.TensorSpec([], tf.string)}
        create_kernels(step.get_concrete_function(spec), spec)
        return step

    with pytest.raises(tf.errors.InvalidArgumentError, match="TPUOrdinalSelector"):
        create(tf.raw_ops.TPUOrdinalSelector)  # for which there is no kernel
    step = create(lambda: tf.constant(0))
    assert counter.numpy() == 0
    step({"x": tf.ones([2, 3]), "name": tf.constant("a")})
    assert counter.numpy() == 1


def test_a_step_that_xla_compiles_does_not_run_early(cpus):
    """XLA would run it although its call is cancelled."""
    counter = tf.Variable(0)

    @tf.function(jit_compile=True)
    def compiled(batch):
        counter.assign_add(1)
        return batch

    one_step_on_data = SimpleNamespace(__wrapped__=compiled)

    def function():
        return one_step_on_data

    dataset = MirroredStrategy(cpus[:2]).experimental_distribute_dataset(tf.data.Dataset.range(8).batch(2))
    trace_step(function, dataset.element_spec)
    assert compiled.experimental_get_tracing_count() == 1 and counter.numpy() == 0


def test_a_step_that_runs_in_python_is_not_traced(cpus):
    traces = _Traces()
    _fit(_model(cpus, run_eagerly=True), traces)
    assert traces.traced == 0


def test_batches_of_which_more_than_the_number_of_rows_is_unknown_are_not_traced_early(cpus):
    """Keras computes something else where it does not know that the last size is 1."""
    model = _model(cpus)
    model.make_train_function()
    for columns in (None, 3):
        part = tf.TensorSpec([None, columns], tf.float32)
        dataset = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=(part, part))
        spec = model.distribute_strategy.experimental_distribute_dataset(dataset).element_spec
        trace_step(model.train_function, spec)
        assert len(model.shapes) == (0 if columns is None else 2)


def _transactions():
    log = ResultLog()
    group = SimpleNamespace(connected_view=None, log=log)
    return StepTransactions(group, lambda: None, lambda view: None), LoggedChannel(
        Channel(0, [None], GroupFailure(), "steps"), log
    )


def test_an_exchange_while_a_step_is_traced_is_an_error():
    """The others have made it in the first step, and not in the one that this worker will repeat."""
    transactions, channel = _transactions()
    with pytest.raises(ReplayError, match="all_reduce"):
        transactions.trace(lambda: channel.all_reduce(np.ones(2)), NOTHING)
    assert channel.all_reduce(np.ones(2)).tolist() == [1.0, 1.0], "later ones are made"


def test_what_a_step_that_is_traced_writes_is_known():
    transactions, _ = _transactions()
    traced = []
    written = SimpleNamespace(trace=lambda write_after: traced.append(transactions.is_running))
    transactions.trace(lambda: transactions._written.trace(None), written)
    assert traced == [True] and not transactions.is_running and transactions._written is NOTHING


class _JoiningFit(ElasticFit):
    """An `ElasticFit` that traces only."""

    def __init__(self, model, trace, others):
        self._trace, self._others = trace, others
        self._iterator = SimpleNamespace(element_spec="spec")
        self._model = model

    others = property(lambda self: self._others)


def test_what_fails_while_it_is_traced_early_fails_again_in_the_first_step():
    made, model = [], SimpleNamespace(make_train_function=lambda force: made.append(force))

    def fail(of_model, spec):
        assert (of_model, spec) == (model, "spec")
        raise ValueError("an error of the program")

    _JoiningFit(model, fail, [keras.callbacks.History()])._trace_step()
    assert made == [True], "the function is as new"


def test_nothing_is_traced_before_code_of_the_program_that_may_change_the_step():
    traced = []
    for begin in (None, lambda epoch, logs: None):
        callback = keras.callbacks.LambdaCallback(on_epoch_begin=begin)
        _JoiningFit(None, lambda model, spec: traced.append(spec), [callback])._trace_step()
    assert traced == ["spec"]
