"""Keras' objects in a form that can be pickled: a model as its file, others as their configurations."""

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
    """Returns a text of an argument that is the same in each process, for `json.dumps(..., default=stable_text)`.

    `repr` contains addresses, and leaves out values of long arrays.

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
    """Returns the model that a file contains.

    Raises:
        ValueError: It has parts that Keras does not know; the message names `custom_objects`.
    """
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
