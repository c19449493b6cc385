"""TensorFlow's runtime in this process: server, key-value store, global seed and generator, autograph."""

import faulthandler
import functools
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import tensorflow as tf

from tfdist.patches import patch, replace
from tfdist.private_symbols import private
from tfdist.strategy_hooks import has_hooks
from tfdist.tensorflow_internals.tensorflow_symbols import context

_random_ops = private(
    "tensorflow.python.ops:stateful_random_ops", "shows whether a global generator exists without creating one"
)

_autograph = private(
    "tensorflow.python.autograph.core:config", "which packages autograph leaves as they are, as TensorFlow and Keras"
)

_GraphStack = private(
    "tensorflow.python.framework.ops:_DefaultGraphStack", "holds the default graph, and the scope in it"
)
private("tensorflow.python.framework.ops:_DefaultGraphStack.reset", "is left out within a scope")

private(
    "tensorflow.python.eager.context:Context.configure_coordination_service",
    "takes a worker that was silent for 10 s for lost, also while a slow link is busy",
)


@patch
def exclude_from_autograph() -> None:
    """Makes autograph call tfdist's functions as they are, as those of TensorFlow and Keras.

    Otherwise it converts all that a `tf.function` of the user calls (`strategy.run` and what that calls), which takes
    seconds. Functions of the user that tfdist calls are converted as before.
    """
    rules = (_autograph.DoNotConvert("tfdist"), *_autograph.CONVERSION_RULES)
    replace(_autograph, "CONVERSION_RULES")(rules)


@patch
def patch_graph_reset() -> None:
    """Keeps the default graph within the scope of a strategy of tfdist, as in `keras.utils.clear_session`.

    The graph holds the scope: what is created afterwards would be outside, and the end of the scope would fail. Without
    graphs of TensorFlow 1 it holds nothing else.
    """
    reset = _GraphStack.reset

    # Not `tf.compat.v1.reset_default_graph`: `import tensorflow.compat.v1` makes another module of that name.
    @replace(_GraphStack, "reset")
    def reset_outside_of_scopes(self: Any) -> None:
        if not (tf.distribute.has_strategy() and has_hooks(tf.distribute.get_strategy())):
            reset(self)


def reject_graphs_of_tensorflow_1() -> None:
    """Raises a `ValueError` within a graph that is not that of a function."""
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise ValueError(
            "The strategies of tfdist need eager execution, which a graph of TensorFlow 1 does not have. Received: "
            f"the default graph {tf.compat.v1.get_default_graph()!r}. Expected: eager execution. Create and use the "
            "strategy outside of `with tf.Graph().as_default():` and without "
            "`tf.compat.v1.disable_eager_execution()`, or use TensorFlow's strategy."
        )


def cluster_is_running() -> bool:
    """Whether a multi-worker strategy has started TensorFlow's server in this process."""
    return context()._collective_ops_server_def is not None


def tensorflow_has_started() -> bool:
    """Whether TensorFlow has created its devices, after which no server can be added."""
    return bool(context()._initialized)


@contextmanager
def exit_on_timeout(seconds: float) -> Iterator[None]:
    """Ends this process, with a traceback, if the body takes longer than `seconds`.

    TensorFlow's start waits for its peers indefinitely, in C++ with Python's lock held: no other thread and no signal
    handler can run meanwhile. The timer of `faulthandler` needs neither.
    """
    try:
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.stderr.fileno())
    except (AttributeError, ValueError, OSError):  # standard error has no file descriptor: a notebook
        yield
        return
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def silence_limit(seconds: float) -> Iterator[None]:
    """Within this context a strategy that starts TensorFlow's coordination service lets workers be silent so long.

    By default TensorFlow ends the training on all workers when one was silent for 10 s. Its heartbeats share the link
    with the gradients, so a transfer that keeps a slow link busy for longer ends the training, too. A service that the
    program has configured itself is not changed.

    Args:
        seconds: Until a silent worker counts as lost. Heartbeats are sent every half of it.
    """
    runtime = context()
    configure = functools.partial(runtime.configure_coordination_service, heartbeat_timeout_in_ms=round(seconds * 1000))
    runtime.configure_coordination_service = configure
    try:
        yield
    finally:
        del runtime.configure_coordination_service


class ClusterKeyValues:
    """The key-value store of TensorFlow's cluster."""

    def publish(self, key: str, value: str, *, only_for: int | None = None) -> None:
        """Gives all workers a value under a new key, also where only one of them needs it."""
        context().set_config_key_value(key, value)

    def wait_for(self, key: str, timeout_seconds: float | None = None) -> str | None:
        """Returns the value under a key, once a worker has published it; `None` after `timeout_seconds`."""
        ended: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()

        def wait() -> None:
            try:
                ended.put(str(context().get_config_key_value(key)))
            except BaseException as error:
                ended.put(error)

        threading.Thread(target=wait, daemon=True, name="tfdist waits for a worker").start()
        try:
            value = ended.get(timeout=timeout_seconds)
        except queue.Empty:
            return None
        if isinstance(value, BaseException):
            raise value
        return value

    def propose(self, key: str, value: str) -> str:
        """Gives all workers a value under a key unless a worker has done so before; returns what is there."""
        with suppress(tf.errors.AlreadyExistsError):
            self.publish(key, value)
        return str(self.wait_for(key))

    def take(self, key: str) -> str:
        """Waits for the value under a key, and removes it."""
        value = str(self.wait_for(key))
        self.withdraw(key)
        return value

    def withdraw(self, key: str) -> None:
        """Removes what was published under a key."""
        context().delete_config_key_value(key)


_key_values: Any = None
_start_seconds = 300.0


def use_key_values(store: Any) -> None:
    """Makes `store`, with `publish`, `wait_for` and `withdraw`, what workers agree by from now on."""
    global _key_values
    _key_values = store


def limit_start(seconds: float) -> None:
    """Sets how long a worker waits for the others while they create the same strategy."""
    global _start_seconds
    _start_seconds = seconds


@contextmanager
def _as_unavailable() -> Iterator[None]:
    """Raises the error of a lost worker as TensorFlow's store does."""
    try:
        yield
    except RuntimeError as error:
        raise tf.errors.UnavailableError(None, None, str(error)) from error


def set_key_value(key: str, value: str, *, only_for: int | None = None) -> None:
    """Publishes `value` to all workers, or to the one of a rank, under `key`, which must be new."""
    _key_values.publish(key, value, only_for=only_for)


def propose_key_value(key: str, value: str) -> str:
    """Publishes `value` under `key` unless a worker has done so before; returns what all workers find there.

    Raises:
        tf.errors.OpError: A worker is lost. The same holds for the waits below.
    """
    with _as_unavailable():
        return str(_key_values.propose(key, value))


def wait_for_key_value(key: str) -> str:
    """Waits until a worker has published `key` and returns its value."""
    with _as_unavailable():
        return str(_key_values.wait_for(key))


def take_key_value(key: str) -> str:
    """Waits like `wait_for_key_value`, and removes what was published for this worker only."""
    with _as_unavailable():
        return str(_key_values.take(key))


def exchange_key_values(name: str, value: str, rank: int, num_workers: int) -> list[str]:
    """Returns the values of all workers, by rank, each of which calls this with its own.

    Args:
        name: Of the values; each name is used once.
        value: Of this worker.
        rank: Of this worker.
        num_workers: The number of workers.

    Raises:
        TimeoutError: A worker does not call this in the time that workers have to start.
        tf.errors.OpError: A worker is lost.
    """
    set_key_value(f"{name}/{rank}", value)
    values = []
    for worker in range(num_workers):
        if not wait_for_key_until(f"{name}/{worker}", _start_seconds):
            raise TimeoutError(
                f"Worker {worker} does not create the strategy that this worker creates. Received: no answer for "
                f"{name!r} in {_start_seconds:g} s. Expected: the same strategies in the same order on all workers. "
                "See what that worker does, or allow more time with `start_timeout_seconds`."
            )
        values.append(wait_for_key_value(f"{name}/{worker}"))
    return values


def wait_for_key_until(key: str, seconds: float) -> bool:
    """Waits like `wait_for_key_value`; returns whether a worker has published `key` within `seconds`."""
    with _as_unavailable():
        return _key_values.wait_for(key, max(seconds, 0.0)) is not None


def delete_key_value(key: str) -> None:
    """Removes what was published under `key`."""
    _key_values.withdraw(key)


def global_seed() -> int | None:
    """Returns TensorFlow's global seed in this process; `None` if none was set."""
    seed = context()._seed
    return None if seed is None else int(seed)


@contextmanager
def global_seed_for_functions(seed: int) -> Iterator[None]:
    """Sets the global seed for functions traced in the body, and leaves the program's random state unchanged.

    `tf.random.set_seed` would also restart the sequence of the numbers drawn from it.
    """
    before = context()._seed
    context()._seed = seed
    try:
        yield
    finally:
        context()._seed = before


def global_generator() -> Any:
    """Returns the global `tf.random.Generator`; `None` if nothing has requested it yet."""
    return _random_ops.global_generator
