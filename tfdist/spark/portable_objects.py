"""Keras' objects in a form that can be pickled, and files of saved estimators and models on any file system of Hadoop.

A model is the content of its file, other objects are configurations. Metadata are written as by Spark ML, beside files
of Python.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pyspark import cloudpickle
from pyspark.ml.param import Params
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter

_OBJECTS = "objects.pickle"


@dataclasses.dataclass(frozen=True)
class ModelFile:
    """A Keras model, as the content of its `.keras` file."""

    content: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class KerasConfig:
    """Another object of Keras, such as an optimizer or a loss, as Keras serializes it."""

    config: Any


def portable(value: Any) -> Any:
    """Replaces objects of Keras, which belong to this process, in a value, also within lists and dictionaries."""
    if "keras" not in sys.modules:  # then there are none
        return value
    import keras

    if isinstance(value, keras.Model):
        return ModelFile(model_content(value))
    if isinstance(value, keras.optimizers.Optimizer | keras.losses.Loss | keras.metrics.Metric):
        return KerasConfig(keras.saving.serialize_keras_object(value))
    if isinstance(value, Mapping):
        return {name: portable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [portable(item) for item in value]
    return value


def stable_text(value: Any) -> str:
    """Returns a text of an argument, for `json.dumps`, that is the same in each process, and has all values of arrays.

    >>> stable_text(object()), stable_text(np.zeros(10_000, np.int8)) == stable_text(np.arange(10_000, dtype=np.int8))
    ('<object object>', False)
    """
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return json.dumps(value.tolist(), default=stable_text)
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, set | frozenset):
        return " ".join(sorted(map(stable_text, value)))
    text = repr(value)
    if hasattr(value, "get_config") and not isinstance(value, type):  # an object of Keras
        # Some configurations cannot be written; then the text is that of `repr`.
        with contextlib.suppress(NotImplementedError, TypeError, ValueError):
            text = f"{type(value).__qualname__} {json.dumps(value.get_config(), default=stable_text)}"
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def restored(value: Any, custom_objects: Mapping[str, Any]) -> Any:
    """Returns new objects for what `portable` has returned."""
    if isinstance(value, ModelFile):
        return loaded_model(value.content, custom_objects, compile=True)
    if isinstance(value, KerasConfig):
        import keras

        return keras.saving.deserialize_keras_object(value.config, custom_objects=dict(custom_objects))
    if isinstance(value, Mapping):
        return {name: restored(item, custom_objects) for name, item in value.items()}
    if isinstance(value, list):
        return [restored(item, custom_objects) for item in value]
    return value


def model_content(model: Any) -> bytes:
    """Returns the content of a model's `.keras` file."""
    with tempfile.TemporaryDirectory(prefix="tfdist-spark-") as directory:
        path = Path(directory) / "model.keras"
        model.save(path)
        return path.read_bytes()


def loaded_model(content: bytes, custom_objects: Mapping[str, Any], *, compile: bool) -> Any:
    """Returns the model that a file contains."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras

    with tempfile.TemporaryDirectory(prefix="tfdist-spark-") as directory:
        path = Path(directory) / "model.keras"
        path.write_bytes(content)
        try:
            return keras.saving.load_model(path, custom_objects=dict(custom_objects), compile=compile)
        except (TypeError, ValueError) as error:
            # Keras repeats the configuration of the whole model.
            reason = str(error).rpartition("Exception encountered: ")[2].partition(" Full object config:")[0]
            raise ValueError(
                f"The model cannot be loaded from its file. Received: {reason} Expected: layers of Keras, or classes "
                "that `custom_objects` has by their names. Give KerasEstimator(custom_objects={'MyLayer': MyLayer}); "
                "a Lambda layer with a Python function cannot be loaded safely: write a class."
            ) from error


def save_params(
    instance: Params, path: str, session: Any, extra: Mapping[str, Any], objects: Mapping[str, Any] | None = None
) -> None:
    """Writes the parameters of an instance: what JSON can hold as Spark ML does, the others by cloudpickle."""
    plain: dict[str, Any] = {}
    pickled: dict[str, Any] = {}
    for param, value in instance._paramMap.items():
        target = plain if _is_json(value) else pickled
        target[param.name] = portable(value)
    content = {"params": pickled, "objects": dict(objects or {})}
    metadata = {"extra": dict(extra), "has_objects": any(content.values())}
    DefaultParamsWriter.saveMetadata(instance, path, session, extraMetadata=metadata, paramMap=plain)
    if metadata["has_objects"]:
        write_file(session, f"{path}/{_OBJECTS}", cloudpickle.dumps(content))


def load_params(instance: Params, path: str, session: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sets the parameters of an instance as they were saved, and returns `extra` and `objects`.

    Objects that are not plain values are unpickled, which runs code of the file: load what you trust.
    """
    metadata = DefaultParamsReader.loadMetadata(path, session)
    instance._resetUid(metadata["uid"])
    DefaultParamsReader.getAndSetParams(instance, metadata)  # type: ignore[type-var]
    content: dict[str, dict[str, Any]] = {"params": {}, "objects": {}}
    if metadata["has_objects"]:
        content = cloudpickle.loads(read_file(session, f"{path}/{_OBJECTS}"))
    instance._set(**content["params"])
    return dict(metadata["extra"]), content["objects"]


def write_file(session: Any, path: str, content: bytes) -> None:
    """Writes a file to a path of Hadoop."""
    with tempfile.TemporaryDirectory(prefix="tfdist-spark-") as directory:
        local = Path(directory) / "file"
        local.write_bytes(content)
        jvm, system, remote = _hadoop(session, path)
        system.copyFromLocalFile(False, True, jvm.org.apache.hadoop.fs.Path(f"file://{local}"), remote)


def read_file(session: Any, path: str) -> bytes:
    """Returns the content of a file at a path of Hadoop."""
    with tempfile.TemporaryDirectory(prefix="tfdist-spark-") as directory:
        local = Path(directory) / "file"
        jvm, system, remote = _hadoop(session, path)
        system.copyToLocalFile(False, remote, jvm.org.apache.hadoop.fs.Path(f"file://{local}"), True)
        return local.read_bytes()


def _hadoop(session: Any, path: str) -> tuple[Any, Any, Any]:
    context = session.sparkContext
    remote = context._jvm.org.apache.hadoop.fs.Path(path)
    return context._jvm, remote.getFileSystem(context._jsc.hadoopConfiguration()), remote


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
