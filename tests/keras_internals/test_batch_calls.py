"""Steps of Keras on single batches, whose graph is called once it is known."""

import keras
import pytest
import tensorflow as tf

from tfdist.keras_internals.batch_calls import BatchCalls
from tfdist.tensorflow_internals.rows_per_replica import RowsPerReplica, RowsPerReplicaSpec

pytestmark = pytest.mark.usefixtures("cpus")


class _Sums(keras.Model):
    """A model that counts its steps, and returns the sum of the values of a batch and their number."""

    def __init__(self):
        super().__init__()
        self.count, self.runs_of_python = keras.Variable(0.0), 0

    def train_step(self, data):
        self.runs_of_python += 1
        self.count.assign_add(1.0)
        values = [value for part in tf.nest.flatten(data) for value in getattr(part, "values", [part])]
        return {"sum": tf.add_n([tf.reduce_sum(value) for value in values]), "step": self.count.value}


def _part(*shape, value=1.0):
    return RowsPerReplica(
        [tf.fill(shape, float(value))], RowsPerReplicaSpec([tf.TensorSpec([None, *shape[1:]])], is_complete=True)
    )


def _calls():
    model = _Sums()
    model.compile()
    model.make_train_function()
    return model, BatchCalls(model.train_function)


def _numbers(logs):
    return float(logs["sum"]), int(logs["step"])


def test_the_graph_of_a_batch_is_called_without_tensorflow_looking_for_it():
    model, calls = _calls()
    for step in range(1, 3):
        assert _numbers(calls((_part(4, 2, value=step), _part(4, 1)))) == (8 * step + 4, step)
    keras_function, calls._function = calls._function, None
    for step in range(3, 5):
        assert _numbers(calls((_part(4, 2, value=step), _part(4, 1)))) == (8 * step + 4, step)
    with pytest.raises(TypeError, match="not callable"):
        calls((_part(3, 2), _part(3, 1)))  # other shapes
    calls._function = keras_function
    for step in range(5, 8):  # the last batches of epochs, of which Keras makes another graph
        assert _numbers(calls((_part(3, 2), _part(3, 1)))) == (9, step)
    assert _numbers(calls((_part(4, 2), _part(4, 1)))) == (12, 8)
    assert model.runs_of_python == 2, "each graph is traced once"


@pytest.mark.parametrize(
    "of",
    [lambda: {"x": _part(4, 2)}, lambda: ({"x": _part(4, 2)},), lambda: (tf.ones([4, 2]),)],
    ids=["dict", "dict in a tuple", "tensor"],
)
def test_other_batches_are_those_of_keras(of):
    (model, calls), batch = _calls(), of()
    for step in range(1, 4):
        assert _numbers(calls(batch)) == (8, step)
    calls._function = None
    with pytest.raises(TypeError, match="not callable"):
        calls(batch)
    assert model.runs_of_python == 1


def test_functions_that_run_eagerly_do_so_after_their_graph_was_called():
    model, calls = _calls()
    for _ in range(3):
        calls((_part(4, 2),))
    before = model.runs_of_python
    tf.config.run_functions_eagerly(True)
    try:
        assert _numbers(calls((_part(4, 2),))) == (8, 4)
    finally:
        tf.config.run_functions_eagerly(False)
    assert model.runs_of_python == before + 1
