"""KerasModel: a transformer of Spark ML that predicts with a trained Keras model, in the processes of executors."""

import collections
import dataclasses
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter

from tfdist.spark.estimator_params import ColumnParams
from tfdist.spark.model_columns import (
    as_array,
    check_columns,
    column,
    combined,
    default_output_type,
    input_specs,
    ordered_outputs,
)
from tfdist.spark.portable_objects import load_params, loaded_model, read_file, save_params, write_file

_FILE = "model.keras"
_SQL_TYPES = {"double": "double", "class": "double", "vector": "array<float>"}


class KerasModel(Model, ColumnParams, MLWritable, MLReadable):
    """A trained Keras model as a transformer, which `KerasEstimator.fit` returns.

    `transform` adds columns with the predictions. Each Python process of Spark loads the model once and predicts in
    batches of Arrow; it keeps the two models that it has used last.

    The type of a column is one of `output_types`: "double" (the default where a row has one number), "array" (the
    default otherwise), "vector" of MLlib, or "class": the index of the largest number, or whether the only one is above
    0.5. Evaluators of MLlib take "double", "class" and "vector".

    `save(path)` writes the parameters as Spark ML does, and `model.keras` beside them, which Keras can load without
    Spark. With `custom_objects` there is a pickle, too: load only what you trust.

    Attributes:
        history: The losses and metrics of the epochs, by name.
        epoch: The numbers of the epochs.
    """

    def __init__(
        self,
        content: bytes = b"",
        *,
        output_shapes: Sequence[Sequence[int | None]] = (),
        history: Mapping[str, Sequence[float]] | None = None,
        epoch: Sequence[int] = (),
        custom_objects: Mapping[str, Any] | None = None,
    ) -> None:
        """Not called by users."""
        super().__init__()
        self._content = content
        self._broadcast: tuple[Any, Any] | None = None
        self._output_shapes = [tuple(shape) for shape in output_shapes]
        self._custom_objects = dict(custom_objects or {})
        self.history = {name: list(values) for name, values in (history or {}).items()}
        self.epoch = list(epoch)
        self._setDefault(feature_cols=["features"], label_cols=["label"], predict_batch_size=256)

    def getModel(self) -> Any:
        """Returns the Keras model, not compiled. It imports Keras."""
        return loaded_model(self._content, self._custom_objects, compile=False)

    def getHistory(self) -> dict[str, list[float]]:
        """Returns `history`."""
        return self.history

    def write(self) -> MLWriter:
        """Returns a writer, for `write().overwrite().save(path)`."""
        return _ModelWriter(self)

    @classmethod
    def read(cls) -> MLReader:
        """Returns a reader, for `read().load(path)`."""
        return _ModelReader()

    def output_columns(self) -> list[str]:
        """Returns the columns of the predictions: by default "prediction", or "prediction_<label>" for several."""
        outputs, labels = len(self._output_shapes), self.getOrDefault(self.label_cols)
        if self.isDefined(self.output_cols):
            names = list(self.getOrDefault(self.output_cols))
            if len(names) != outputs:
                raise ValueError(
                    f"There is another number of columns than of outputs. Received: output_cols={names}. Expected: "
                    f"{outputs} names."
                )
            return names
        if outputs == 1:
            return ["prediction"]
        suffixes = labels if len(labels) == outputs else range(outputs)
        return [f"prediction_{suffix}" for suffix in suffixes]

    def _transform(self, dataset: Any) -> Any:
        from pyspark.ml.functions import array_to_vector
        from pyspark.sql import functions

        features, names = self.getOrDefault(self.feature_cols), self.output_columns()
        check_columns(dataset, features, "feature_cols")
        if taken := [name for name in names if name in dataset.columns]:
            raise ValueError(
                f"The DataFrame has the columns of the predictions already. Received: output_cols={names}, of which "
                f"{taken} exist. Expected: new names. Set `output_cols`, or drop these columns."
            )
        kinds = self._types()
        task = PredictionTask(
            hashlib.sha256(self._content).hexdigest(),
            self._broadcast_content(dataset.sparkSession.sparkContext),
            self._custom_objects,
            tuple(features),
            tuple(self.getOrDefault(self.label_cols)),
            tuple(kinds),
            self.getOrDefault(self.predict_batch_size),
        )
        types = [self._sql_type(kind, shape) for kind, shape in zip(kinds, self._output_shapes, strict=True)]
        fields = ", ".join(f"output_{index} {kind}" for index, kind in enumerate(types))
        predict = functions.pandas_udf(predict_function(task), types[0] if len(types) == 1 else fields)  # type: ignore[call-overload]
        values = predict(*(as_array(dataset, name) for name in features))
        temporary = names[0] if len(names) == 1 else f"{self.uid}_outputs"
        result = dataset.withColumn(temporary, values)
        outputs = (
            [column(temporary)] if len(names) == 1 else [column(temporary)[f"output_{i}"] for i in range(len(names))]
        )
        for name, kind, output in zip(names, kinds, outputs, strict=True):
            if name != temporary or kind == "vector":
                result = result.withColumn(name, array_to_vector(output) if kind == "vector" else output)
        return result if len(names) == 1 else result.drop(temporary)

    def _broadcast_content(self, context: Any) -> Any:
        if self._broadcast is None or self._broadcast[0] is not context:
            self._broadcast = context, context.broadcast(self._content)
        return self._broadcast[1]

    def _types(self) -> list[str]:
        defaults = [default_output_type(shape) for shape in self._output_shapes]
        kinds = list(self.getOrDefault(self.output_types)) if self.isDefined(self.output_types) else defaults
        if len(kinds) != len(defaults):
            raise ValueError(
                f"There is another number of types than of outputs. Received: output_types={kinds}. Expected: "
                f"{len(defaults)} types."
            )
        return kinds

    @staticmethod
    def _sql_type(kind: str, shape: Sequence[int | None]) -> str:
        rank = max(len(shape), 1)
        return _SQL_TYPES.get(kind, "array<" * rank + "float" + ">" * rank)


class _ModelWriter(MLWriter):
    def __init__(self, instance: KerasModel) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        instance, session = self._instance, self.sparkSession
        extra = {"history": instance.history, "epoch": instance.epoch, "output_shapes": instance._output_shapes}
        save_params(instance, path, session, extra, objects={"custom_objects": instance._custom_objects})
        write_file(session, f"{path}/{_FILE}", instance._content)


class _ModelReader(MLReader):
    def load(self, path: str) -> KerasModel:
        instance = KerasModel()
        extra, objects = load_params(instance, path, self.sparkSession)
        instance._content = read_file(self.sparkSession, f"{path}/{_FILE}")
        instance._custom_objects = objects.get("custom_objects", {})
        instance._output_shapes = [tuple(shape) for shape in extra["output_shapes"]]
        instance.history, instance.epoch = extra["history"], extra["epoch"]
        return instance


_KEPT_MODELS = 2


@dataclasses.dataclass(frozen=True)
class PredictionTask:
    """What to predict."""

    key: str  # identifies the model
    content: Any  # the content of its file: a broadcast variable of Spark
    custom_objects: Mapping[str, Any]  # classes and functions by the names that they have in the file
    feature_cols: tuple[str, ...]  # the columns of the features
    label_cols: tuple[str, ...]  # the columns of the labels, which name outputs in dictionaries
    output_types: tuple[str, ...]  # the types of the outputs: "double", "array", "vector" or "class"
    batch_size: int  # rows of a batch


def predict_function(task: PredictionTask) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Returns the function of a pandas UDF, from batches of columns to columns of predictions."""
    import pandas as pd

    def predict(batches: Iterator[tuple[pd.Series, ...]]) -> Iterator[pd.Series]:
        for columns in batches:
            yield pd.Series(_outputs(task, columns)[0])

    def predict_several(batches: Iterator[tuple[pd.Series, ...]]) -> Iterator[pd.DataFrame]:
        for columns in batches:
            outputs = enumerate(_outputs(task, columns))
            yield pd.DataFrame({f"output_{index}": pd.Series(values) for index, values in outputs})

    return predict if len(task.output_types) == 1 else predict_several


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


def _outputs(task: PredictionTask, columns: Any) -> list[Any]:
    columns = columns if isinstance(columns, tuple) else (columns,)  # Spark does not wrap a single one
    rows = len(columns[0])
    if rows == 0:
        return [[] for _ in task.output_types]
    model = _loaded(task)
    specs = input_specs(model, task.feature_cols)
    by_name = {name: column.to_numpy() for name, column in zip(task.feature_cols, columns, strict=True)}
    arrays = [spec.array([by_name[name] for name in spec.columns]) for spec in specs]
    parts = []
    for start in range(0, rows, task.batch_size):
        batch = combined([array[start : start + task.batch_size] for array in arrays])
        parts.append(ordered_outputs(model.predict_on_batch(batch), task.label_cols))
    outputs = [np.concatenate(values) for values in zip(*parts, strict=True)]
    return [as_column(values, kind) for values, kind in zip(outputs, task.output_types, strict=True)]


_loaded_models: collections.OrderedDict[str, Any] = collections.OrderedDict()  # those that this process has used last
_loading = threading.Lock()


def _loaded(task: PredictionTask) -> Any:
    with _loading:
        if task.key not in _loaded_models:
            _use_resources_of_task()
            _loaded_models[task.key] = loaded_model(task.content.value, task.custom_objects, compile=False)
        _loaded_models.move_to_end(task.key)
        while len(_loaded_models) > _KEPT_MODELS:
            _loaded_models.popitem(last=False)
        return _loaded_models[task.key]


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
