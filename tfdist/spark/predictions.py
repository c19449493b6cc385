"""Predictions in the Python processes of executors, which load a model once."""

import collections
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tfdist.spark.model_tensors import combined, input_specs, ordered_outputs
from tfdist.spark.portable_objects import loaded_model

_KEPT_MODELS = 2


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What to predict.

    Args:
        key: Identifies the model.
        content: Its file: a broadcast variable of Spark.
        custom_objects: Classes and functions by the names that they have in the file.
        feature_cols: The columns of the features.
        label_cols: The columns of the labels, which name outputs in dictionaries.
        output_types: The types of the outputs: "double", "array", "vector" or "class".
        batch_size: Rows of a batch.
    """

    key: str
    content: Any
    custom_objects: Mapping[str, Any]
    feature_cols: tuple[str, ...]
    label_cols: tuple[str, ...]
    output_types: tuple[str, ...]
    batch_size: int


def predict_function(prediction: Prediction) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Returns the function of a pandas UDF, from batches of columns to columns of predictions."""
    import pandas as pd

    def predict(batches: Iterator[tuple[pd.Series, ...]]) -> Iterator[pd.Series]:
        for columns in batches:
            yield pd.Series(_outputs(prediction, columns)[0])

    def predict_several(batches: Iterator[tuple[pd.Series, ...]]) -> Iterator[pd.DataFrame]:
        for columns in batches:
            outputs = enumerate(_outputs(prediction, columns))
            yield pd.DataFrame({f"output_{index}": pd.Series(values) for index, values in outputs})

    return predict if len(prediction.output_types) == 1 else predict_several


def as_column(values: np.ndarray, output_type: str) -> Any:
    """Returns the outputs of rows as the values of a column.

    >>> as_column(np.array([[0.25, 0.75], [1.0, 0.0]]), "class").tolist()
    [1.0, 0.0]
    >>> as_column(np.array([[0.25], [0.75]]), "double").tolist()
    [0.25, 0.75]
    """
    flat = values.reshape(len(values), -1)
    if output_type == "class":
        chosen = flat[:, 0] > 0.5 if flat.shape[1] == 1 else flat.argmax(axis=1)
        return chosen.astype("float64")
    if output_type == "double":
        if flat.shape[1] != 1:
            raise ValueError(
                f"An output has more than one number a row. Received: shape {values.shape[1:]} for 'double'. Expected: "
                "one number. Set `output_types` to 'array', 'vector' or 'class'."
            )
        return flat[:, 0].astype("float64")
    return list(flat.astype("float32")) if output_type == "vector" or values.ndim <= 2 else values.tolist()


def _outputs(prediction: Prediction, columns: Any) -> list[Any]:
    columns = columns if isinstance(columns, tuple) else (columns,)  # Spark does not wrap a single one
    rows = len(columns[0])
    if rows == 0:
        return [[] for _ in prediction.output_types]
    model = _models.get(prediction)
    specs = input_specs(model, prediction.feature_cols).values()
    by_name = {name: column.to_numpy() for name, column in zip(prediction.feature_cols, columns, strict=True)}
    arrays = [spec.array([by_name[name] for name in spec.columns]) for spec in specs]
    parts = []
    for start in range(0, rows, prediction.batch_size):
        batch = combined([array[start : start + prediction.batch_size] for array in arrays])
        parts.append(ordered_outputs(model.predict_on_batch(batch), prediction.label_cols))
    outputs = [np.concatenate(values) for values in zip(*parts, strict=True)]
    return [as_column(values, kind) for values, kind in zip(outputs, prediction.output_types, strict=True)]


class _LoadedModels:
    """The models that this process has used last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: collections.OrderedDict[str, Any] = collections.OrderedDict()

    def get(self, prediction: Prediction) -> Any:
        """Returns a model."""
        with self._lock:
            if prediction.key not in self._models:
                _use_resources_of_task()
                content = prediction.content.value
                self._models[prediction.key] = loaded_model(content, prediction.custom_objects, compile=False)
            self._models.move_to_end(prediction.key)
            while len(self._models) > _KEPT_MODELS:
                self._models.popitem(last=False)
            return self._models[prediction.key]


_models = _LoadedModels()


def _use_resources_of_task() -> None:
    """Gives TensorFlow the cores and GPUs of this task, if this process has not used it before."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        return
    if (gpus := context.resources().get("gpu")) is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.addresses)
    import tensorflow as tf

    try:
        tf.config.threading.set_intra_op_parallelism_threads(context.cpus())
        tf.config.threading.set_inter_op_parallelism_threads(1)
    except RuntimeError:
        return
