"""Files of saved estimators and models on any file system of Hadoop: metadata as Spark ML, beside files of Python."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyspark import cloudpickle
from pyspark.ml.param import Params
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter

from tfdist.spark.portable_objects import portable

_OBJECTS = "objects.pickle"


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
