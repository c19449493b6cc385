"""`KerasEstimator` in a session of Spark: exact training, pipelines, files, searches, restarts; nothing is left."""

import functools
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import spark_models
from engine_runs import eventually, launched_processes
from local_spark import require_spark, spark_environment, spark_session

from tfdist.launch import WorkerError

require_spark()
HERE = Path(__file__).parent
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def spark(tmp_path_factory):
    directory = tmp_path_factory.mktemp("temporary")
    with spark_environment(directory, HERE), spark_session("local[2]") as session:
        yield session
        eventually(lambda: not launched_processes(directory), "the processes of places")
        assert not list(directory.glob("tfdist-*"))


@pytest.fixture
def store(tmp_path):
    """The store of an estimator; afterwards it is empty, but for runs with a name."""
    yield tmp_path / "store"
    assert [path.name for path in (tmp_path / "store").glob("*") if path.name != "tfdist-run-named"] == []


ROWS = 90


def rows():
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(ROWS, 4)).astype("float32")
    return inputs, inputs.sum(axis=1) + 1, generator.uniform(0.5, 1.5, ROWS)


@pytest.fixture(scope="module")
def frame(spark):
    inputs, labels, weights = rows()
    data = [
        (*map(float, row), float(label), float(weight))
        for row, label, weight in zip(inputs, labels, weights, strict=True)
    ]
    return spark.createDataFrame(data, ["a", "b", "c", "d", "label", "weight"]).repartition(3).cache()


def assembler():
    from pyspark.ml.feature import VectorAssembler

    return VectorAssembler(inputCols=["a", "b", "c", "d"], outputCol="features")


def estimator(store, **options):
    from tfdist.spark import KerasEstimator

    given = {"model_fn": spark_models.build, "epochs": 3, "batch_size": 16, "random_seed": 1, "verbose": 0}
    return KerasEstimator(store=str(store), **{**given, **options})


def predicted(frame):
    return np.array([row.prediction for row in frame.orderBy("a").collect()])


def test_a_pipeline_trains_as_one_process_and_is_saved(spark, frame, store, tmp_path, cpus):
    import keras
    from pyspark.ml import Pipeline, PipelineModel

    from tfdist.data import from_spark

    pipeline = Pipeline(stages=[assembler(), estimator(store, sample_weight_col="weight")])
    model = pipeline.fit(frame)
    trained = model.stages[1]

    data = from_spark(assembler().transform(frame), store=tmp_path / "reference")
    columns = {"features": "features", "label": "label", "weight": "weight", "shapes": {"features": (4,)}}
    keras.utils.set_random_seed(1)
    alone = spark_models.build()
    dataset = data.dataset(16, **columns, dtypes={"label": "float32"}, shuffle=True, seed=1, streams=2)
    history = alone.fit(dataset, epochs=3, verbose=0)
    for found, expected in zip(trained.getModel().get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)  # the order of sums of float32
    np.testing.assert_allclose(trained.history["loss"], history.history["loss"], rtol=1e-5)
    assert trained.epoch == [0, 1, 2] and set(trained.history) == {"loss", "mae"}

    inputs = np.array([[row.a, row.b, row.c, row.d] for row in frame.orderBy("a").collect()], "float32")
    expected = trained.getModel().predict(inputs, verbose=0)[:, 0]
    result = model.transform(frame)
    np.testing.assert_allclose(predicted(result), expected, rtol=0, atol=1e-6)
    assert dict(result.dtypes)["prediction"] == "double"
    assert result.where("a > 100").count() == 0, "no rows"

    model.save(str(tmp_path / "model"))
    again = PipelineModel.load(str(tmp_path / "model"))
    np.testing.assert_array_equal(predicted(again.transform(frame)), predicted(result))
    assert again.stages[1].history == trained.history and again.stages[1].uid == trained.uid
    saved = next((tmp_path / "model" / "stages").glob("1_*")) / "model.keras"
    np.testing.assert_array_equal(keras.saving.load_model(saved).get_weights()[0], trained.getModel().get_weights()[0])

    pipeline.write().overwrite().save(str(tmp_path / "pipeline"))
    loaded = Pipeline.load(str(tmp_path / "pipeline")).getStages()[1]
    assert loaded.getOrDefault("model_fn") is spark_models.build and loaded.getOrDefault("epochs") == 3


def test_several_inputs_and_outputs(spark, store):
    from pyspark.ml.linalg import Vectors

    generator = np.random.default_rng(0)
    data = [
        (index, float(index % 3), [float(value) for value in image], float(index % 3), Vectors.dense(image))
        for index, image in enumerate(generator.normal(size=(48, 4)))
    ]
    frame = spark.createDataFrame(data, ["id", "number", "image", "kind", "vector"])
    frame = frame.selectExpr("*", "number * 2 as size", "id % 4 = 0 as held_out")
    model = estimator(
        store,
        model_fn=spark_models.build_with_two_heads,
        feature_cols=["number", "image"],
        label_cols=["kind", "size"],
        loss=["sparse_categorical_crossentropy", "mse"],
        optimizer="adam",
        validation="held_out",
        output_types=["class", "double"],
    ).fit(frame)
    assert {"val_loss", "val_kind_loss", "val_size_loss"} <= set(model.history)
    found = model.transform(frame)
    assert dict(found.dtypes)["prediction_kind"] == dict(found.dtypes)["prediction_size"] == "double"
    assert {row.prediction_kind for row in found.collect()} <= {0.0, 1.0, 2.0}
    renamed = model.copy().setOutputTypes(["vector", "array"]).setOutputCols(["p", "s"])
    row = renamed.setFeatureCols(["vector", "number"]).transform(frame.drop("image")).first()
    assert row.p.size == 3 and abs(sum(row.p) - 1) < 1e-6 and len(row.s) == 1


def test_a_model_of_the_driver_with_objects_of_keras(spark, frame, store, tmp_path, cpus):
    import keras

    from tfdist.spark import KerasEstimator, KerasModel

    class Twice(keras.layers.Layer):  # of this function: sent by value
        def call(self, inputs):
            return 2 * inputs

    first = keras.Sequential([keras.Input((4,)), Twice(), keras.layers.Dense(1, kernel_initializer="ones")])
    stage = KerasEstimator(
        model=first,
        custom_objects={"Twice": Twice},
        optimizer=keras.optimizers.SGD(0.0),
        loss=keras.losses.MeanAbsoluteError(),
        metrics=[keras.metrics.MeanSquaredError(name="square")],
        callbacks=[keras.callbacks.EarlyStopping("loss", patience=1)],
        feature_cols=["a", "b", "c", "d"],
        compression="fp16",
        epochs=5,
        verbose=0,
        workers=1,
        store=store,
    )
    stage.save(str(tmp_path / "estimator"))
    model = KerasEstimator.load(str(tmp_path / "estimator")).fit(frame)
    assert model.epoch == [0, 1], "stopped early, as nothing is learned"
    np.testing.assert_array_equal(model.getModel().get_weights()[0], np.ones([4, 1]))
    expected = [2 * (row.a + row.b + row.c + row.d) for row in frame.orderBy("a").collect()]
    model.save(str(tmp_path / "model"))
    found = KerasModel.load(str(tmp_path / "model")).setOutputCols("p").transform(frame).orderBy("a").collect()
    np.testing.assert_allclose([row.p for row in found], expected, atol=1e-5)


def test_an_interrupt_leaves_no_file(spark, frame, store, tmp_path):
    def interrupt():
        eventually(lambda: (tmp_path / "started").exists(), "started")
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    callbacks = functools.partial(spark_models.waiting, str(tmp_path / "started"))
    with pytest.raises(KeyboardInterrupt):
        estimator(store, callbacks=callbacks).fit(assembler().transform(frame))
    thread.join()


def test_a_search_of_parameters(spark, frame, store):
    from pyspark.ml.evaluation import RegressionEvaluator
    from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

    stage = estimator(store, workers=1, epochs=2)
    grid = ParamGridBuilder().addGrid(stage.model_kwargs, [{"learning_rate": 0.0}, {"learning_rate": 0.05}]).build()
    search = CrossValidator(
        estimator=stage, estimatorParamMaps=grid, evaluator=RegressionEvaluator(), numFolds=2, seed=0
    )
    found = search.fit(assembler().transform(frame))
    assert found.avgMetrics[1] < found.avgMetrics[0], "without learning the errors are larger"
    assert found.bestModel.history["loss"][1] < found.bestModel.history["loss"][0]


def test_a_run_with_a_name_resumes_and_refuses_others(spark, frame, store):
    data = assembler().transform(frame)
    first = estimator(store, run_id="named", epochs=1, workers=1).fit(data)
    both = estimator(store, run_id="named", epochs=2, workers=1).fit(data)
    whole = estimator(store, epochs=2, workers=1).fit(data)
    assert both.history["loss"][0] == first.history["loss"][0]
    for found, expected in zip(both.getModel().get_weights(), whole.getModel().get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r"The store has another run of this name. Received: run_id='named'"):
        estimator(store, run_id="named", epochs=2, workers=1).fit(data.limit(80))


def test_a_killed_worker_changes_no_weight(spark, frame, store, tmp_path):
    data = assembler().transform(frame)
    options = {"checkpoint_every_steps": 2, "shuffle": False}
    killed = tmp_path / "killed"
    callbacks = functools.partial(spark_models.killer, str(killed))
    found = estimator(store, callbacks=callbacks, max_restarts=1, **options).fit(data)
    assert killed.exists()
    expected = estimator(store, **options).fit(data)
    for one, other in zip(found.getModel().get_weights(), expected.getModel().get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_failure_shows_the_users_lines_and_leaves_no_file(spark, frame, store):
    with pytest.raises(WorkerError, match="KeyError: 'no such layer'") as caught:
        estimator(store, model_fn=spark_models.build_wrongly).fit(assembler().transform(frame))
    assert 'raise KeyError("no such layer")' in caught.value.traceback
    with pytest.raises(ValueError, match=r"does not have these columns: \['features'\]"):
        estimator(store).fit(frame)
    with pytest.raises(ValueError, match="There are no rows to train on"):
        estimator(store).fit(assembler().transform(frame).limit(0))
    with pytest.raises(ValueError, match="Invalid `validation`"):
        estimator(store, validation=1.5).fit(assembler().transform(frame))


def test_a_fraction_is_split_by_the_values(spark, frame):
    from tfdist.spark.model_columns import split

    train, held_out = split(frame, 0.25, ["a", "b"], 0)
    again, _ = split(frame.repartition(5), 0.25, ["a", "b"], 0)
    assert train.count() + held_out.count() == ROWS and 10 < held_out.count() < 35
    assert {row.a for row in train.collect()} == {row.a for row in again.collect()}
    assert {row.a for row in split(frame, 0.25, ["a", "b"], 1)[0].collect()} != {row.a for row in train.collect()}
