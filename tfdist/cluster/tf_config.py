"""Reads and checks the environment variable `TF_CONFIG`.

TensorFlow reads `TF_CONFIG`, too, but detects most mistakes late or never: with a wrong index or a shared address it
waits forever for a peer. Here each mistake raises an error that names it.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

from tfdist.cluster.cluster_spec import ClusterConfig, ClusterSpec, Task

VARIABLE = "TF_CONFIG"
_EXAMPLE = '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'


def has_tf_config(environ: Mapping[str, str] | None = None) -> bool:
    """Whether `TF_CONFIG` is set and not blank."""
    return bool((os.environ if environ is None else environ).get(VARIABLE, "").strip())


def from_tf_config(environ: Mapping[str, str] | None = None) -> ClusterConfig:
    """Reads and checks `TF_CONFIG`.

    Keys other than `cluster` and `task` are ignored: some platforms add keys.

    Args:
        environ: The environment. Defaults to `os.environ`.

    Returns:
        The cluster and the task of this process.

    Raises:
        ValueError: If the variable is not set, or its content is wrong.

    >>> config = from_tf_config({"TF_CONFIG": '{"cluster": {"chief": ["a:1"], "worker": ["b:1"]},'
    ...                                       ' "task": {"type": "worker", "index": 0}}'})
    >>> config.rank, config.num_workers
    (1, 2)
    """
    text = (os.environ if environ is None else environ).get(VARIABLE, "")
    try:
        return _parse(text)
    except ValueError as error:
        raise ValueError(f"{VARIABLE} is wrong. {error}") from error


def _parse(text: str) -> ClusterConfig:
    if not text.strip():
        raise ValueError(f"The variable is not set or empty. Received: {text!r}. Expected: JSON such as {_EXAMPLE}.")
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"It is not JSON ({error.msg} at character {error.pos}). Received: {_shortened(text)}. Expected: JSON such "
            f"as {_EXAMPLE}. Write it with json.dumps, and mind the shell's quotes."
        ) from error
    cluster = _required(document, "cluster", {"worker": ["host0:2222"]})
    task = _required(document, "task", {"type": "worker", "index": 0})
    task_type = _required(task, "type", "worker", where="task")
    index = _required(task, "index", 0, where="task")
    return ClusterConfig(ClusterSpec(cluster), Task(task_type, index), source=VARIABLE)


def _required(document: object, key: str, example: object, where: str = "") -> Any:
    name = f"{where!r}" if where else "the document"
    if not isinstance(document, Mapping):
        raise ValueError(
            f"{name.capitalize()} must be a JSON object. Received: {_shortened(json.dumps(document))}. Expected: an "
            f"object with the key {key!r}, as in {_EXAMPLE}."
        )
    if key not in document:
        raise ValueError(
            f"The key {key!r} is missing in {name}. Received: {_shortened(json.dumps(document))}. Expected: "
            f"{json.dumps({key: example})} there, as in {_EXAMPLE}. For training in one process unset {VARIABLE}."
        )
    return document[key]


def _shortened(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"
