"""The parameters of `KerasEstimator` and `KerasModel`, as those of Spark ML."""

import os
from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters

OUTPUT_TYPES = ("double", "array", "vector", "class")


def names(value: Any) -> list[str]:
    """Returns a list of names of columns; a string is one name.

    >>> names("features"), names(("a", "b"))
    (['features'], ['a', 'b'])
    """
    return [value] if isinstance(value, str) else TypeConverters.toListString(value)


def output_types(value: Any) -> list[str]:
    """Returns a list of types of columns, all of which exist."""
    type_names = names(value)
    if not set(type_names) <= set(OUTPUT_TYPES):
        raise TypeError(f"Invalid `output_types`. Received: {type_names}. Expected: some of {list(OUTPUT_TYPES)}.")
    return type_names


def _param(name: str, doc: str, converter: Any = None) -> Any:
    return Param(Params._dummy(), name, doc, converter)


class ColumnParams(Params):
    """The columns of data, which an estimator passes on to its model."""

    feature_cols = _param("feature_cols", "columns of the features", names)
    label_cols = _param("label_cols", "columns of the labels", names)
    output_cols = _param("output_cols", "columns of the predictions", names)
    output_types = _param("output_types", f"types of these: {', '.join(OUTPUT_TYPES)}", output_types)
    predict_batch_size = _param("predict_batch_size", "rows of a batch of predictions", TypeConverters.toInt)

    def setFeatureCols(self, value: Any) -> Any:
        """Sets the columns of the features."""
        return self._set(feature_cols=value)

    def setOutputCols(self, value: Any) -> Any:
        """Sets the columns of the predictions."""
        return self._set(output_cols=value)

    def setOutputTypes(self, value: Any) -> Any:
        """Sets the types of the columns of the predictions."""
        return self._set(output_types=value)


class TrainingParams(ColumnParams):
    """What an estimator trains, and how."""

    model_fn = _param("model_fn", "function that returns a model")
    model = _param("model", "model to copy, instead of model_fn")
    model_kwargs = _param("model_kwargs", "keyword arguments of model_fn")
    optimizer = _param("optimizer", "optimizer, if the model is not compiled")
    loss = _param("loss", "loss, if the model is not compiled")
    loss_weights = _param("loss_weights", "weights of the losses")
    metrics = _param("metrics", "metrics, if the model is not compiled")
    custom_objects = _param("custom_objects", "classes and functions of the model by their names")
    callbacks = _param("callbacks", "callbacks of fit, or a function that returns them")
    sample_weight_col = _param("sample_weight_col", "column of the sample weights", TypeConverters.toString)
    validation = _param("validation", "fraction of the rows, or a column that says which rows")
    batch_size = _param("batch_size", "rows of an update, over all workers", TypeConverters.toInt)
    val_batch_size = _param("val_batch_size", "rows of a step of the validation", TypeConverters.toInt)
    epochs = _param("epochs", "number of epochs", TypeConverters.toInt)
    shuffle = _param("shuffle", "whether rows are shuffled in each epoch", TypeConverters.toBoolean)
    random_seed = _param("random_seed", "seed of weights, shuffles and the validation split", TypeConverters.toInt)
    verbose = _param("verbose", "verbosity of fit on the first worker", TypeConverters.toInt)
    compression = _param("compression", "compression of gradients")
    workers = _param("workers", "number of workers", TypeConverters.toInt)
    threads_per_worker = _param("threads_per_worker", "threads of each worker", TypeConverters.toInt)
    max_restarts = _param("max_restarts", "how often to restart all workers", TypeConverters.toInt)
    start_timeout_seconds = _param("start_timeout_seconds", "how long to wait for slots", TypeConverters.toFloat)
    checkpoint_every_steps = _param("checkpoint_every_steps", "steps between checkpoints", TypeConverters.toInt)
    store = _param("store", "directory that the driver and all executors see", os.fspath)
    run_id = _param("run_id", "name of the run in the store, to resume it", TypeConverters.toString)
