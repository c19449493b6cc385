"""TensorFlow's server in this process: whether it runs, and the key-value store that the workers share."""

import faulthandler
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tfdist.tensorflow_internals.symbols import context


def cluster_is_running() -> bool:
    """Whether a multi-worker strategy has started TensorFlow's server in this process."""
    return context()._collective_ops_server_def is not None


def tensorflow_has_started() -> bool:
    """Whether TensorFlow has made its devices, after which no server can be added."""
    return bool(context()._initialized)


def global_seed() -> int | None:
    """TensorFlow's global seed in this process, if one was set."""
    seed = context()._seed
    return None if seed is None else int(seed)


def share(key: str, value: str) -> None:
    """Makes `value` known to all workers under `key`, which must be new."""
    context().set_config_key_value(key, value)


def shared(key: str) -> str:
    """Waits until some worker has shared `key` and returns its value."""
    return str(context().get_config_key_value(key))


@contextmanager
def exit_after(seconds: float) -> Iterator[None]:
    """Ends this process, with a traceback, if what is within takes longer.

    TensorFlow's start waits for its peers for ever, in C++ with Python's lock held: no other thread, and no signal
    handler, can run meanwhile. The timer of `faulthandler` needs neither.
    """
    try:
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.stderr.fileno())
    except (AttributeError, ValueError, OSError):  # no file behind the standard error: a notebook
        yield
        return
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
