"""KerasModel: a transformer of Spark ML that predicts with a trained Keras model."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter

from tfdist.spark.estimator_params import ColumnParams
from tfdist.spark.model_tensors import default_output_type
from tfdist.spark.object_files import load_params, read_file, save_params, write_file
from tfdist.spark.portable_objects import loaded_model
from tfdist.spark.predictions import Prediction, predict_function
from tfdist.spark.spark_columns import as_array, check_columns, column

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
        """Not called by users.

        Args:
            content: The file of the model.
            output_shapes: The shapes of the outputs, of a row.
            history: The losses and metrics of the epochs.
            epoch: The numbers of the epochs.
            custom_objects: Classes and functions by the names that they have in the file.
        """
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
        """Returns the columns of the predictions: by default "prediction", or "prediction_<label>" of several."""
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
        prediction = Prediction(
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
        predict = functions.pandas_udf(predict_function(prediction), types[0] if len(types) == 1 else fields)  # type: ignore[call-overload]
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
