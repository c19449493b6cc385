"""The background writers of the `fit`s of this process, also of those that were interrupted, as in a notebook."""

import logging
import weakref

from tfdist.checkpoint import BackgroundWriter

_log = logging.getLogger("tfdist")
_writers: weakref.WeakSet[BackgroundWriter] = weakref.WeakSet()


def new_writer() -> BackgroundWriter:
    """A writer for one `fit`, when all that was begun by earlier ones has been written."""
    for writer in list(_writers):
        writer.join()  # its `fit` may be running, in another thread or around this one, and is to raise its error
    writer = BackgroundWriter()
    _writers.add(writer)
    return writer


def finish(writer: BackgroundWriter) -> None:
    """Waits for what a `fit` that is over has begun to write, and logs its error."""
    try:
        writer.wait()
    except Exception as error:
        _log.warning("FailureRecovery: the last save of an earlier `fit` failed: %s", error)
