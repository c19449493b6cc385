"""Trains a network as a stage of a Spark ML pipeline, chooses its width by cross-validation, and saves the pipeline.

    python examples/engines/pipeline_on_spark.py                                             on this host
    spark-submit examples/engines/pipeline_on_spark.py --master= --directory /shared/digits  on a cluster

The last line shows the accuracies.
"""

import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from absl import app, flags
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import DataFrame, SparkSession

from tfdist.spark import KerasEstimator

_MASTER = flags.DEFINE_string("master", "local[2]", "Spark's master; empty: as spark-submit says.")
_WORKERS = flags.DEFINE_integer("workers", 2, "Workers, each in a slot of Spark.", lower_bound=1)
_EPOCHS = flags.DEFINE_integer("epochs", 10, "Passes over the training images.", lower_bound=1)
_DIRECTORY = flags.DEFINE_string("directory", None, "For data and the pipeline; all hosts see it. Default: temporary.")
_PIXELS = [f"pixel_{index}" for index in range(64)]


def build(units: int = 64) -> Any:
    """Returns a compiled network. Each worker calls this."""
    import keras

    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(units, activation="gelu"), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    return model


def digits(spark: SparkSession) -> DataFrame:
    """Returns the images as 64 columns, with their labels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    rows = [(*(float(pixel) / 16 for pixel in image), int(label)) for image, label in zip(images, labels, strict=True)]
    return spark.createDataFrame(rows, [*_PIXELS, "label"])


def main(_: list[str]) -> None:
    """Searches, saves the best pipeline, loads it, and prints its accuracy."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder: Any = SparkSession.builder.appName("pipeline").config("spark.ui.enabled", "false")
    with ExitStack() as stack:
        spark = (builder.master(_MASTER.value) if _MASTER.value else builder).getOrCreate()
        stack.callback(spark.stop)
        directory = Path(_DIRECTORY.value or stack.enter_context(tempfile.TemporaryDirectory()))
        train, test = digits(spark).randomSplit([0.8, 0.2], seed=0)
        estimator = KerasEstimator(
            model_fn=build,
            feature_cols="features",
            label_cols="label",
            batch_size=64,
            epochs=_EPOCHS.value,
            random_seed=0,
            verbose=0,
            workers=_WORKERS.value,
            max_restarts=2,
            store=str(directory / "store"),
            output_types="class",
        )
        pipeline = Pipeline(stages=[VectorAssembler(inputCols=_PIXELS, outputCol="features"), estimator])
        grid = ParamGridBuilder().addGrid(estimator.model_kwargs, [{"units": 2}, {"units": 64}]).build()
        accuracy = MulticlassClassificationEvaluator(metricName="accuracy")
        search = CrossValidator(estimator=pipeline, estimatorParamMaps=grid, evaluator=accuracy, numFolds=2, seed=0)
        found = search.fit(train)
        chosen: Any = found.bestModel
        chosen.write().overwrite().save(str(directory / "pipeline"))
        best = PipelineModel.load(str(directory / "pipeline"))
        print(
            f"digits: {found.avgMetrics[0]:.1%} with 2 units, {found.avgMetrics[1]:.1%} with 64 in cross-validation; "
            f"{accuracy.evaluate(best.transform(test)):.1%} of the held-out images".replace("%", " %")
        )


if __name__ == "__main__":
    app.run(main)
