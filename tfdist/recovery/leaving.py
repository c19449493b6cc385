"""Ends the process of a worker that has been asked to, when all is saved."""

import logging
import os
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from tfdist.keras_internals.callbacks import open_files

_log = logging.getLogger("tfdist")


def leave(exit_code: int, callbacks: Iterable[Any], *, is_alone: bool) -> NoReturn:
    """Ends this process with `exit_code`; what `callbacks` have written is in their files then.

    `on_train_end` of callbacks is not called: the training is not over.

    Args:
      exit_code: the status of the process.
      callbacks: those that `fit` calls.
      is_alone: whether there are no other workers. TensorFlow's shutdown waits for these, each of which is here.
    """
    for file in (file for callback in callbacks for file in open_files(callback)):
        try:
            file.flush()
        except Exception as error:
            _log.warning("FailureRecovery: what a callback has written may be incomplete: %s", error)
    if is_alone:
        raise SystemExit(exit_code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
