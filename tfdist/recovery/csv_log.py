"""What a `keras.callbacks.CSVLogger` has written, so that a training that goes on appends at the right line."""

from typing import Any

import keras
import tensorflow as tf

_ENCODING = {"encoding": "utf-8", "errors": "surrogateescape"}


def state_of_log(logger: keras.callbacks.CSVLogger) -> dict[str, Any]:
    """The text of the log so far, and its columns.

    The text is kept because a logger that does not append empties its file when training begins, before anyone can
    restore anything.
    """
    text = ""
    if tf.io.gfile.exists(logger.filename):
        with tf.io.gfile.GFile(logger.filename, "rb") as file:
            text = file.read().decode(**_ENCODING)
    return {"text": text, "keys": logger.keys}


def restore_log(logger: keras.callbacks.CSVLogger, state: dict[str, Any]) -> None:
    """Writes the log as it was, without the lines of epochs that will come again, and opens it to append to."""
    if logger.csv_file is not None and not logger.csv_file.closed:
        logger.csv_file.close()
    with tf.io.gfile.GFile(logger.filename, "wb") as file:
        file.write(state["text"].encode(**_ENCODING))
    appends = logger.append
    logger.append = True
    try:
        keras.callbacks.CSVLogger.on_train_begin(logger)  # finds out whether the file has a header
    finally:
        logger.append = appends
    logger.keys = state["keys"]
