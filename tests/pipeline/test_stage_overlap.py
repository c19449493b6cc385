"""Stages compute different micro-batches at the same time, and the graph does not grow with the micro-batches."""

import time
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from pipeline_runs import strategy_of

pytestmark = pytest.mark.usefixtures("cpus")
SECONDS, STAGES, MICRO_BATCHES, WIDTH = 0.02, 4, 8, 16


def slept(x: tf.Tensor, seconds: float) -> tf.Tensor:
    """`x` after a pause, in which no thread of the executor is blocked."""
    # DatasetToSingleElement takes two elements. It is stateful, as the operations of dropout and assertions are.
    types, shapes = [x.dtype], [x.shape]
    dataset = tf.raw_ops.TensorDataset(components=[x], output_shapes=shapes)
    microseconds = tf.constant(int(seconds / 2 * 1e6), tf.int64)
    dataset = tf.raw_ops.SleepDataset(
        input_dataset=dataset, sleep_microseconds=microseconds, output_types=types, output_shapes=shapes
    )
    element = tf.raw_ops.DatasetToSingleElement(dataset=dataset, output_types=types, output_shapes=shapes)
    return tf.ensure_shape(element[0], x.shape)


class Sleep(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        @tf.custom_gradient
        def wait(x: tf.Tensor) -> Any:
            return tf.stop_gradient(slept(x, SECONDS)), lambda gradient: slept(gradient, 2 * SECONDS)

        return wait(x)

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor(x.shape, x.dtype)


def build(micro_batches: int, schedule: str) -> keras.Model:
    cuts = [f"dense_{stage}" for stage in range(1, STAGES)]
    with strategy_of(STAGES, micro_batches=micro_batches, schedule=schedule, cuts=cuts).scope():
        inputs = x = keras.Input((WIDTH,))
        for stage in range(STAGES):
            x = keras.layers.Dense(WIDTH, name=f"dense_{stage}")(x)
            x = Sleep(name=f"sleep_{stage}")(keras.layers.Dropout(0.1)(x))
        model = keras.Model(inputs, x)
        model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.long)])
def test_sleeping_stages_overlap(schedule: str) -> None:
    model = build(MICRO_BATCHES, schedule)
    x = np.ones((MICRO_BATCHES * 2, WIDTH), "float32")
    ideal = (MICRO_BATCHES + STAGES - 1) * 3 * SECONDS
    in_turn = MICRO_BATCHES * STAGES * 3 * SECONDS
    model.train_on_batch(x, x)  # traces
    durations = [float("inf")]
    while len(durations) <= 30 and min(durations) > 1.3 * ideal:  # until the host is not busy for the time of a step
        start = time.perf_counter()
        model.train_on_batch(x, x)
        durations.append(time.perf_counter() - start)
    assert ideal < min(durations) < 1.3 * ideal < in_turn / 2


def test_a_stage_is_traced_once() -> None:
    def operations(micro_batches: int) -> tuple[int, set[str]]:
        model = build(micro_batches, "1f1b")
        x = tf.ones((24, WIDTH))
        model._symbolic_build(data_batch=(x, x))
        step = tf.function(lambda: model.distribute_strategy.run(model.train_step, ((x, x),)))
        graph = step.get_concrete_function().graph
        functions = {op.get_attr("f").name for op in graph.get_operations() if "PartitionedCall" in op.type}
        definitions = {one.signature.name: one for one in graph.as_graph_def().library.function}
        assert all(definitions[name].attr["_noinline"].b for name in functions)
        return len(graph.get_operations()), functions

    (few, functions), (many, others) = operations(2), operations(8)
    assert len(functions) == len(others) == 3 * STAGES  # forward, backward, update
    assert many < few + 6 * STAGES * 40
