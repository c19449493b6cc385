"""Scalars in TensorBoard's event files, with which a training that is started again goes on."""

import contextlib
import os
import socket
import time
from collections.abc import Mapping

import tensorflow as tf

_FRAME_BYTES = 16  # of a TFRecord: its length, and checksums of that and of the data
_NEVER = 2**62  # a step that no training comes to
_SCALAR = 1  # DATA_CLASS_SCALAR of TensorFlow's summary.proto


class EventLog:
    """One run of TensorBoard's: a directory with an event file for each start of a training.

    TensorBoard's package is not needed for writing. What is written is there at once, also for a process that is
    killed after it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     log = EventLog(directory, "a-training")
    ...     log.write(10, {"tfdist/step_ms": 12.5}, {"tfdist/step_ms": "how long a step took"})
    ...     log.close()
    ...     len(os.listdir(directory))
    1
    """

    def __init__(self, directory: str, training: str, *, forget_after: int | None = None) -> None:
        """Begins a file.

        Args:
          directory: of this run, made where it is missing; whatever `tf.io.gfile` knows.
          training: names the training in the names of its files; letters, digits and "-".
          forget_after: takes out what was written of steps after this one by earlier starts of the training, which
            are made again. Files of other trainings stay as they are.
        """
        tf.io.gfile.makedirs(directory)
        if forget_after is not None:
            for path in tf.io.gfile.glob(os.path.join(directory, f"events.out.tfevents.*.{training}")):
                _cut(path, forget_after)
        name = f"events.out.tfevents.{time.time_ns():019d}.{socket.gethostname()}.{os.getpid()}.{training}"
        self._writer = tf.io.TFRecordWriter(os.path.join(directory, name))
        self._described: set[str] = set()
        self._append(tf.compat.v1.Event(wall_time=time.time(), file_version="brain.Event:2"))
        # A TensorBoard that has read those steps already forgets them at every start but the first that it sees: from
        # the step on that stands there.
        start = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
        first_forgotten = _NEVER if forget_after is None else forget_after + 1
        self._append(tf.compat.v1.Event(wall_time=time.time(), step=first_forgotten, session_log=start))

    def write(self, step: int, scalars: Mapping[str, float], descriptions: Mapping[str, str]) -> None:
        """Writes a point of each curve.

        Args:
          step: where on the axis.
          scalars: values by their tags.
          descriptions: what TensorBoard says of a tag, in Markdown.
        """
        event = tf.compat.v1.Event(wall_time=time.time(), step=step)
        for tag, number in scalars.items():
            value = event.summary.value.add(tag=tag, tensor=tf.make_tensor_proto(number, tf.float32))
            if tag not in self._described:  # the first of a file counts
                self._described.add(tag)
                value.metadata.plugin_data.plugin_name = "scalars"
                value.metadata.data_class = _SCALAR
                value.metadata.summary_description = descriptions.get(tag, "")
        self._append(event)

    def close(self) -> None:
        """Ends the file."""
        self._writer.close()

    def _append(self, event: tf.compat.v1.Event) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()


def _cut(path: str, step: int) -> None:
    """Takes events of steps after `step` out of a file, and a record that a killed process has left unfinished."""
    kept: list[bytes] = []
    with contextlib.suppress(tf.errors.DataLossError):
        for record in tf.data.TFRecordDataset(path).as_numpy_iterator():
            kept += [record] * _is_kept(tf.compat.v1.Event.FromString(record), step)
    # By the size: what is shorter than a frame's beginning passes for the end of the file.
    if tf.io.gfile.stat(path).length > sum(len(record) + _FRAME_BYTES for record in kept):
        unfinished = os.path.join(os.path.dirname(path), "unfinished")  # no name that TensorBoard would read
        with tf.io.TFRecordWriter(unfinished) as writer:
            for record in kept:
                writer.write(record)
        tf.io.gfile.rename(unfinished, path, overwrite=True)


def _is_kept(event: tf.compat.v1.Event, step: int) -> bool:
    return event.step <= step or event.HasField("session_log")
