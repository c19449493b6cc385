"""TensorFlow's runtime in this process: server, global seed and generator, autograph."""

import functools
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import tensorflow as tf

from tfdist.patches import patch, replace
from tfdist.private_symbols import private
from tfdist.strategy_hooks import has_hooks
from tfdist.tensorflow_internals.tensorflow_symbols import context
from tfdist.utils.temporary_values import setting_attributes

_random_ops = private(
    "tensorflow.python.ops:stateful_random_ops", "shows whether a global generator exists without creating one"
)

_autograph = private(
    "tensorflow.python.autograph.core:config", "which packages autograph leaves as they are, as TensorFlow and Keras"
)

_GraphStack = private(
    "tensorflow.python.framework.ops:_DefaultGraphStack", "holds the default graph, and the scope in it"
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


def global_seed() -> int | None:
    """Returns TensorFlow's global seed in this process; `None` if none was set."""
    seed = context()._seed
    return None if seed is None else int(seed)


def global_seed_for_functions(seed: int) -> AbstractContextManager[None]:
    """Sets the global seed for functions traced in the body, and leaves the program's random state unchanged.

    `tf.random.set_seed` would also restart the sequence of the numbers drawn from it.
    """
    return setting_attributes(context(), _seed=seed)


def global_generator() -> Any:
    """Returns the global `tf.random.Generator`; `None` if nothing has requested it yet."""
    return _random_ops.global_generator


def is_read_by_user() -> bool:
    """Whether the caller's property is being read by a user's code.

    TensorFlow's strategies, Keras and tfdist read the number of replicas, too.
    """
    frame: Any = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("tensorflow.python.distribute."):
            return module.partition(".")[0] not in ("keras", "tensorflow", "tfdist")
        frame = frame.f_back
    return False


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
