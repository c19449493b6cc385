"""MirroredStrategy of tfdist in one process: several at once, buckets, traffic, refusals."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from stock_strategy import stock_mirrored

from tfdist.strategies import MirroredStrategy, MultiWorkerMirroredStrategy

INPUTS = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
TARGETS = INPUTS.sum(axis=1, keepdims=True)


def compiled(strategy, optimizer="sgd", **arguments):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(32),
                keras.layers.Dense(1),
            ]
        )
        model.compile(optimizer() if callable(optimizer) else keras.optimizers.get(optimizer), loss="mse", **arguments)
    return model


def fit(model, batch_size=8, epochs=1, **arguments):
    data = tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS)).batch(batch_size)
    return model.fit(data, epochs=epochs, verbose=0, **arguments)


def test_is_a_tensorflow_strategy_with_its_positional_arguments(cpus):
    operations = tf.distribute.ReductionToOneDevice()
    strategy = MirroredStrategy(cpus[:2], operations)
    assert isinstance(strategy, tf.distribute.MirroredStrategy)
    assert strategy.num_replicas_in_sync == 2
    fit(compiled(strategy))


def test_several_strategies_in_one_process(cpus):
    outcomes = []
    strategies = [MirroredStrategy(cpus[:2]), MirroredStrategy(cpus[2:]), MirroredStrategy(cpus)]
    models = [compiled(strategy) for strategy in strategies]
    for _ in range(2):  # alternating, so that each would meet the others' collectives
        for model in models:
            fit(model)
    outcomes = [np.concatenate([weight.ravel() for weight in model.get_weights()]) for model in models]
    np.testing.assert_allclose(outcomes[0], outcomes[1], atol=0)
    np.testing.assert_allclose(outcomes[0], outcomes[2], atol=1e-6)


def test_one_replica_is_enough(cpus):
    model = compiled(MirroredStrategy(cpus[:1]), lambda: keras.optimizers.SGD(0.1))
    before = model.get_weights()[0]
    fit(model)
    assert not np.array_equal(before, model.get_weights()[0])


@pytest.mark.parametrize(
    ("bucket_bytes", "buckets"), [pytest.param(0, 1, marks=pytest.mark.long), (1, 6), (4 * 64 * 32, 2)]
)
def test_bucket_bytes_decides_how_many_collectives_carry_an_update(cpus, bucket_bytes, buckets):
    strategy = MirroredStrategy(cpus[:2], bucket_bytes=bucket_bytes)
    model = compiled(strategy)
    fit(model)
    before = strategy.communication
    fit(model)
    traffic = strategy.communication - before
    assert traffic.gradient_collectives == 2 * buckets  # two steps
    assert traffic.gradient_bytes == 2 * 4 * model.count_params()


def test_the_first_bucket_does_not_wait_for_the_last_gradient(cpus):
    """No path leads from the first layer's gradient, computed last, to the exchange of the last layer's."""
    strategy = MirroredStrategy(cpus[:2], bucket_bytes=1)
    model = compiled(strategy)

    @tf.function
    def step(inputs, targets):
        strategy.run(model.train_step, args=((inputs, targets),))

    graph = step.get_concrete_function(tf.constant(INPUTS[:4]), tf.constant(TARGETS[:4])).graph
    reduces = [
        op
        for op in graph.get_operations()
        if op.type in ("CollectiveReduceV2", "CollectiveGatherV2") and op.device.endswith("CPU:0")
    ]
    gradients = [op for op in reduces if op.inputs[0].shape.num_elements() in (4 * 64, 64 * 32, 32)]
    last_layer = next(op for op in gradients if op.inputs[0].shape.num_elements() == 32)
    first_layer = next(op for op in gradients if op.inputs[0].shape.num_elements() == 4 * 64)

    def reaches(start, target):
        seen, open_operations = set(), [start]
        while open_operations:
            operation = open_operations.pop()
            if operation is target:
                return True
            if operation.name not in seen:
                seen.add(operation.name)
                open_operations += [tensor.op for tensor in operation.inputs] + list(operation.control_inputs)
        return False

    first_gradient = first_layer.inputs[0].op
    assert reaches(first_layer, first_gradient)
    assert not reaches(last_layer, first_gradient)


def test_one_exchange_an_update_with_accumulation(cpus):
    strategy = MirroredStrategy(cpus[:2])
    model = compiled(strategy, lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=4))
    fit(model, batch_size=4)  # four micro-steps, one update
    assert strategy.communication.gradient_collectives == 1
    fit(model, batch_size=4, epochs=2)
    assert strategy.communication.gradient_collectives == 3
    assert int(model.optimizer.iterations) == 3


def test_a_step_sends_one_other_collective_for_metrics_and_statistics(cpus):
    strategy = MirroredStrategy(cpus[:2])
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        model.compile("sgd", loss="mse", metrics=["mae", "mse", keras.metrics.RootMeanSquaredError()])
    inputs, targets = tf.constant(INPUTS), tf.constant(TARGETS)
    data = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(8, drop_remainder=True)
    )
    step = tf.function(lambda batch: strategy.run(model.train_step, args=(batch,)))
    batches = list(data)
    step(batches[0])
    before = strategy.communication
    step(batches[1])
    assert (strategy.communication - before).other_collectives == 1


@pytest.mark.parametrize("bucket_bytes", [-1, 1.5, True, "4MB"])
def test_bucket_bytes_must_be_a_size(cpus, bucket_bytes):
    with pytest.raises(ValueError, match=r"Invalid `bucket_bytes`. Received: bucket_bytes=.*Expected: a number"):
        MirroredStrategy(cpus[:2], bucket_bytes=bucket_bytes)


def test_nccl_without_a_gpu_is_refused(cpus):
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.NCCL
    )
    with pytest.raises(ValueError, match="NCCL reduces between GPUs only.*Expected: a visible GPU"):
        MirroredStrategy(cpus[:2], communication_options=options)


@pytest.mark.parametrize("strategy", [MirroredStrategy, MultiWorkerMirroredStrategy])
def test_a_graph_of_tensorflow_1_is_refused(cpus, strategy):
    with tf.Graph().as_default(), pytest.raises(ValueError, match=r"need eager execution.*Received: the default graph"):
        strategy()


def test_an_optimizer_made_outside_of_the_scope_is_refused(cpus):
    optimizer = keras.optimizers.SGD()
    model = compiled(MirroredStrategy(cpus[:2]), optimizer)
    with pytest.raises(ValueError, match=r"optimizer was created outside the strategy's scope.*SGD"):
        fit(model)


def test_a_metric_made_outside_of_the_scope_is_refused(cpus):
    model = compiled(MirroredStrategy(cpus[:2]), metrics=[keras.metrics.MeanAbsoluteError(name="stray")])
    with pytest.raises(ValueError, match=r"variable was created outside the strategy's scope.*stray/"):
        fit(model)


def test_a_model_made_outside_of_the_scope_is_refused(cpus):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="stray")])
    strategy = MirroredStrategy(cpus[:2])
    model._distribute_strategy = strategy
    with strategy.scope():
        model.compile("sgd", loss="mse")
    with pytest.raises(ValueError, match=r"variable was created outside the strategy's scope.*stray/kernel"):
        fit(model)


def test_other_strategies_and_plain_keras_go_on_as_ever(cpus):
    """Keras asks tfdist for its own strategies only."""
    MirroredStrategy(cpus[:2])
    stock = stock_mirrored(cpus[:2])
    fit(compiled(stock))
    with stock.scope():
        schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1], [1.0, 0.5])
        optimizer = keras.optimizers.SGD(schedule, gradient_accumulation_steps=4)
    optimizer._iterations.assign(3)
    assert float(optimizer.learning_rate) == 0.5, "Keras' own rule counts micro-steps"
    plain = compiled(tf.distribute.get_strategy(), lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    fit(plain)


def test_reduce_takes_structures_and_rank_zero_values(cpus):
    strategy = MirroredStrategy(cpus[:2])
    values = strategy.run(lambda: {"a": tf.constant(2.0), "b": tf.constant([1.0, 3.0])})
    assert float(strategy.reduce("MEAN", values, axis=0)["a"]) == 2.0
    np.testing.assert_array_equal(strategy.reduce("SUM", values, axis=None)["b"], [2.0, 6.0])


def test_replicas_stay_bit_identical(cpus):
    strategy = MirroredStrategy(cpus[:3])
    model = compiled(strategy, "adam")
    fit(model, batch_size=7)
    for variable in model.trainable_variables + model.optimizer.variables:
        values = [replica.numpy() for replica in strategy.experimental_local_results(variable.value)]
        assert all(np.array_equal(values[0], value) for value in values), variable.path


def test_what_is_saved_loads_in_a_plain_process(cpus, tmp_path):
    strategy = MirroredStrategy(cpus[:2])
    model = compiled(strategy, "adam")
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for ours, theirs in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    fit(loaded)


def test_replicas_drop_different_units_and_the_first_those_of_one_process(cpus):
    inputs = tf.ones([1, 64])
    strategies = [tf.distribute.get_strategy(), MirroredStrategy(cpus[:2])]
    kept = []
    for strategy in strategies:
        with strategy.scope():
            dropout = keras.layers.Dropout(0.5, seed=1)
            dropout.build((None, 64))
        outputs = strategy.run(lambda layer=dropout: layer(inputs, training=True))
        kept.append([output.numpy() for output in strategy.experimental_local_results(outputs)])
    np.testing.assert_array_equal(kept[1][0], kept[0][0])
    assert not np.array_equal(kept[1][1], kept[1][0])


def test_a_function_within_an_eager_replica_is_an_error_and_not_a_hang(cpus):
    strategy = MirroredStrategy(cpus[:2])

    @tf.function
    def reduced(value):
        return tf.distribute.get_replica_context().all_reduce("SUM", value)

    with pytest.raises(RuntimeError, match="merge_call"):
        strategy.run(lambda: reduced(tf.constant(1.0)))


def test_a_log_of_another_dtype_than_its_metric_is_the_mean(cpus):
    class HalfLog(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, inputs):
            return self.dense(inputs)

        def train_step(self, data):
            super().train_step(data)
            return {"loss": tf.cast(tf.reduce_mean(data[0][:, 0]), tf.bfloat16)}

    strategy = MirroredStrategy(cpus[:2])
    with strategy.scope():
        model = HalfLog()
        model.compile("sgd", loss="mse")
    logs = model.train_on_batch(INPUTS[:8], TARGETS[:8], return_dict=True)
    # bfloat16 has 8 bits: 2 ** -8 of a value below 1
    assert abs(float(logs["loss"]) - INPUTS[:8, 0].mean()) < 2**-7


def test_a_large_metric_is_left_to_the_end_of_the_epoch(cpus):
    strategy = MirroredStrategy(cpus[:2])
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(300)])
        model.compile("sgd", loss="mse", metrics=[keras.metrics.MeanIoU(300, sparse_y_true=False, sparse_y_pred=False)])
    targets = np.eye(300, dtype="float32")[np.arange(16)]
    data = tf.data.Dataset.from_tensor_slices((INPUTS, targets)).batch(8)
    history = model.fit(data, verbose=0)
    assert strategy.communication.other_bytes < 300 * 300 * 4
    assert np.isfinite(history.history["mean_io_u"]).all()
