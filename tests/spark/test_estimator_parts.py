"""What an estimator and a model do without a session of Spark."""

import json

import numpy as np
import pytest
from child_environment import run_python

pytest.importorskip("pyspark", reason="needs the extra `spark`")

from tfdist.spark import KerasEstimator, KerasModel
from tfdist.spark.keras_estimator import RunDirectory, store_path
from tfdist.spark.keras_model import as_column
from tfdist.spark.model_columns import InputSpec, input_specs, ordered_outputs
from tfdist.spark.portable_objects import portable, restored, stable_text


def test_a_driver_without_tensorflow_constructs_an_estimator():
    program = (
        "import sys\n"
        "sys.modules['tensorflow'] = sys.modules['keras'] = None\n"
        "from tfdist.spark import KerasEstimator\n"
        "print(KerasEstimator(model_fn=print, epochs=3).copy().getOrDefault('epochs'))"
    )
    assert run_python("-c", program).stdout == "3\n"


def test_parameters_are_those_of_spark_ml():
    estimator = KerasEstimator(model_fn=print, feature_cols="x", batch_size=8)
    assert estimator.getOrDefault(estimator.feature_cols) == ["x"]
    assert estimator.getOrDefault("label_cols") == ["label"] and estimator.getOrDefault("workers") == 2
    other = estimator.copy({estimator.batch_size: 16}).setParams(epochs=5)
    assert [other.getOrDefault(name) for name in ("batch_size", "epochs")] == [16, 5]
    assert [estimator.getOrDefault(name) for name in ("batch_size", "epochs")] == [8, 1]
    with pytest.raises(TypeError, match="batch_size"):
        KerasEstimator(batch_size="many")
    with pytest.raises(TypeError, match=r"Invalid `output_types`. Received: \['text'\]"):
        KerasEstimator(output_types="text")
    with pytest.raises(TypeError, match="unexpected keyword"):
        KerasEstimator(num_proc=2)


@pytest.mark.parametrize("arguments", [{}, {"model_fn": print, "model": "m"}, {"model_fn": "build"}])
def test_there_is_one_source_of_the_model(arguments, tmp_path):
    with pytest.raises(ValueError, match="There has to be one source of the model"):
        KerasEstimator(store=str(tmp_path), **arguments)._fit(None)


@pytest.mark.parametrize("store", [None, "", "hdfs://host/runs"])
def test_a_store_is_a_directory(store):
    with pytest.raises(ValueError, match="There is no store that the workers can share"):
        store_path(store)


def test_only_a_run_with_a_name_stays(tmp_path):
    store = store_path(f"file://{tmp_path}/store")
    assert store == tmp_path / "store" and store.is_dir()
    (store / "mine").mkdir()
    for name in ("mine", None):
        run = RunDirectory(store, name)
        run.path.mkdir()
        run.remove()
        assert run.path.exists() == (name is not None)
    assert (store / "mine").exists(), "a directory that is not a run"
    with pytest.raises(ValueError, match="Invalid `run_id`"):
        RunDirectory(store, "a/b")


@pytest.mark.usefixtures("cpus")
def test_columns_become_inputs():
    import keras

    one = keras.Sequential([keras.Input((2, 2)), keras.layers.Flatten()])
    assert input_specs(one, ["x"]) == [InputSpec(("x",), "float32", (2, 2))]
    assert input_specs(one, ["a", "b"])[0] == InputSpec(("a", "b"), "float32", None)
    first, second = keras.Input((1,), name="first"), keras.Input((3,), name="second", dtype="int32")
    two = keras.Model([first, second], [keras.layers.Dense(1)(first), keras.layers.Dense(1)(second)])
    assert [spec.columns for spec in input_specs(two, ["second", "first"])] == [("first",), ("second",)]
    assert [spec.columns for spec in input_specs(two, ["u", "v"])] == [("u",), ("v",)]
    assert input_specs(two, ["u", "v"])[1] == InputSpec(("v",), "int32", (3,))
    with pytest.raises(ValueError, match="The model has another number of inputs than there are columns"):
        input_specs(two, ["u", "v", "w"])
    assert input_specs(keras.Sequential([keras.layers.Dense(1)]), ["u"])[0] == InputSpec(("u",), None, None)


def test_values_of_rows_become_arrays():
    flat = np.empty(2, object)
    flat[:] = [np.arange(4.0), np.arange(4.0) + 1]
    assert InputSpec(("x",), "float32", (2, 2)).array([flat]).tolist() == [[[0, 1], [2, 3]], [[1, 2], [3, 4]]]
    both = InputSpec(("a", "x"), "float32", None).array([np.array([7.0, 8.0]), flat])
    assert both.tolist() == [[7, 0, 1, 2, 3], [8, 1, 2, 3, 4]] and both.dtype == "float32"
    nested = np.empty(1, object)
    nested[0] = np.empty(2, object)
    nested[0][:] = [np.arange(2.0), np.arange(2.0)]
    assert InputSpec(("x",), None, None).array([nested]).tolist() == [[[0, 1], [0, 1]]]
    with pytest.raises(ValueError, match="A feature is null"):
        InputSpec(("x",), None, None).array([np.array([flat[0], None], object)])
    with pytest.raises(ValueError, match="The rows of a feature have different lengths"):
        InputSpec(("x",), None, None).array([[np.arange(2), np.arange(3)]])


def test_outputs_become_columns():
    values = np.array([[0.25, 0.75], [1.0, 0.0]], "float32")
    assert as_column(values, "class").tolist() == [1.0, 0.0] and as_column(values[:, :1], "class").tolist() == [
        0.0,
        1.0,
    ]
    assert as_column(values[:, :1], "double").tolist() == [0.25, 1.0]
    assert [row.tolist() for row in as_column(values, "array")] == values.tolist()
    assert as_column(values.reshape(1, 2, 2), "array") == [values.tolist()]
    with pytest.raises(ValueError, match="An output has more than one number a row"):
        as_column(values, "double")
    assert ordered_outputs({"b": 1, "a": 2}, ["b", "a"]) == [1, 2] and ordered_outputs({"b": 1, "a": 2}, ["c"]) == [
        2,
        1,
    ]


@pytest.mark.parametrize(
    ("shapes", "labels", "given", "expected"),
    [
        ([(1,)], ["label"], None, ["prediction"]),
        ([(1,), (3,)], ["a", "b"], None, ["prediction_a", "prediction_b"]),
        ([(1,), (3,)], ["both"], None, ["prediction_0", "prediction_1"]),
        ([(1,)], ["label"], "p", ["p"]),
    ],
)
def test_names_of_predictions(shapes, labels, given, expected):
    model = KerasModel(b"", output_shapes=shapes)._set(label_cols=labels)
    assert (model.setOutputCols(given) if given else model).output_columns() == expected


def test_columns_and_types_are_one_for_each_output():
    model = KerasModel(b"", output_shapes=[(1,), (3,)])
    with pytest.raises(ValueError, match="There is another number of columns than of outputs"):
        model.copy().setOutputCols(["a"]).output_columns()
    with pytest.raises(ValueError, match="There is another number of types than of outputs"):
        model.copy().setOutputTypes(["double"])._types()
    assert model._types() == ["double", "array"]


@pytest.mark.usefixtures("cpus")
def test_objects_of_keras_are_sent_as_configurations():
    import pickle

    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.5), loss="mse")
    sent = portable(
        {"optimizer": keras.optimizers.Adam(0.25), "metrics": [keras.metrics.AUC()], "model": model, "a": 1}
    )
    found = restored(pickle.loads(pickle.dumps(sent)), {})
    assert float(found["optimizer"].learning_rate) == 0.25 and found["a"] == 1
    assert type(found["metrics"][0]) is keras.metrics.AUC and float(found["model"].optimizer.learning_rate) == 0.5
    np.testing.assert_array_equal(found["model"].get_weights()[0], model.get_weights()[0])


@pytest.mark.usefixtures("cpus")
def test_texts_of_arguments_are_alike_in_every_process():
    """A named run resumes after a restart of the driver if its arguments are alike."""

    def text(*values):
        return json.dumps(values, default=stable_text)

    import keras

    class Encoder:
        pass

    assert text(Encoder(), keras.losses.Huber(2.0)) == text(Encoder(), keras.losses.Huber(2.0))
    one, other = keras.initializers.RandomNormal(0.1), keras.initializers.RandomNormal(0.2)
    assert text(one) != text(other)
    zeros, almost_zeros = np.zeros((2, 5000)), np.zeros((2, 5000))
    almost_zeros[0, 2500] = 1
    assert text(zeros) != text(almost_zeros) and text(zeros) == text(zeros.copy())
    words = np.array(["a", "b"], dtype=object)
    assert json.loads(text(words, {"b", "a"}, keras.layers.GRU)) == [
        '["a", "b"]',
        "'a' 'b'",
        "<class 'keras.src.layers.rnn.gru.GRU'>",
    ]


def test_a_class_that_keras_does_not_know_is_named():
    import keras

    class Twice(keras.layers.Layer):
        def call(self, inputs):
            return 2 * inputs

    sent = portable(keras.Sequential([keras.Input((2,)), Twice()]))
    assert restored(sent, {"Twice": Twice})(np.ones([1, 2])).numpy().tolist() == [[2.0, 2.0]]
    with pytest.raises(
        ValueError, match=r"The model cannot be loaded from its file. .* Give KerasEstimator\(custom_obj"
    ):
        restored(sent, {})
