"""Event files of TensorBoard that a restarted training continues."""

import contextlib
import os
import socket
import time
from collections.abc import Mapping

import tensorflow as tf

_FRAME_BYTES = 16  # overhead of a TFRecord: length and two checksums
_NEVER = 2**62  # a step that no training reaches
_SCALAR = 1  # DATA_CLASS_SCALAR of TensorFlow's summary.proto


class EventLog:
    """A run of TensorBoard: a directory with one event file per start of a training.

    Writing does not need the package `tensorboard`. Each event is flushed, so that it survives a kill of this process.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     log = EventLog(directory, "a-training")
    ...     log.write(10, {"tfdist/step_ms": 12.5}, {"tfdist/step_ms": "Duration of a step."})
    ...     log.close()
    ...     len(os.listdir(directory))
    1
    """

    def __init__(self, directory: str, training: str, *, forget_after: int | None = None) -> None:
        """Creates an event file.

        Args:
            directory: Directory of this run, created if missing. Any path that `tf.io.gfile` supports.
            training: Identifies the training in the names of its files: letters, digits and "-".
            forget_after: Removes the events of later steps from the files that earlier starts of this training wrote,
                since these steps are computed again. Files of other trainings are not changed.
        """
        tf.io.gfile.makedirs(directory)
        if forget_after is not None:
            for path in tf.io.gfile.glob(os.path.join(directory, f"events.out.tfevents.*.{training}")):
                _cut(path, forget_after)
        name = f"events.out.tfevents.{time.time_ns():019d}.{socket.gethostname()}.{os.getpid()}.{training}"
        self._writer = tf.io.TFRecordWriter(os.path.join(directory, name))
        self._described: set[str] = set()
        self._append(tf.compat.v1.Event(wall_time=time.time(), file_version="brain.Event:2"))
        # A running TensorBoard discards the steps that it has already read, from the step of a START event on; it
        # ignores the first START event that it reads.
        start = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
        first_forgotten = _NEVER if forget_after is None else forget_after + 1
        self._append(tf.compat.v1.Event(wall_time=time.time(), step=first_forgotten, session_log=start))

    def write(self, step: int, scalars: Mapping[str, float], descriptions: Mapping[str, str]) -> None:
        """Writes one point of each curve.

        Args:
            step: The training step.
            scalars: Values by tag.
            descriptions: Markdown that TensorBoard shows, by tag.
        """
        event = tf.compat.v1.Event(wall_time=time.time(), step=step)
        for tag, number in scalars.items():
            value = event.summary.value.add(tag=tag, tensor=tf.make_tensor_proto(number, tf.float32))
            if tag not in self._described:  # TensorBoard reads the metadata of a tag's first event
                self._described.add(tag)
                value.metadata.plugin_data.plugin_name = "scalars"
                value.metadata.data_class = _SCALAR
                value.metadata.summary_description = descriptions.get(tag, "")
        self._append(event)

    def close(self) -> None:
        self._writer.close()

    def _append(self, event: tf.compat.v1.Event) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()


def _cut(path: str, step: int) -> None:
    """Removes from a file the events after `step`, and a record that a killed process has not completed."""
    kept: list[bytes] = []
    with contextlib.suppress(tf.errors.DataLossError):
        for record in tf.data.TFRecordDataset(path).as_numpy_iterator():
            kept += [record] * _is_kept(tf.compat.v1.Event.FromString(record), step)
    # Compare sizes: the reader takes an incomplete frame header for the end of the file.
    if tf.io.gfile.stat(path).length > sum(len(record) + _FRAME_BYTES for record in kept):
        unfinished = os.path.join(os.path.dirname(path), "unfinished")  # TensorBoard does not read files of this name
        with tf.io.TFRecordWriter(unfinished) as writer:
            for record in kept:
                writer.write(record)
        tf.io.gfile.rename(unfinished, path, overwrite=True)


def _is_kept(event: tf.compat.v1.Event, step: int) -> bool:
    return event.step <= step or event.HasField("session_log")
