"""The scope of a Keras step on a worker: reads the servers' variables, and collects changes instead of making them."""

import contextvars
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.loss_scaling import LossStep
from tfdist.keras_internals.scheduled_training import is_seed_state, server_variable
from tfdist.tensorflow_internals.function_methods import is_in_compiled_function
from tfdist.tensorflow_internals.server_variables import pull_as

_current: contextvars.ContextVar["WorkerScope | None"] = contextvars.ContextVar("tfdist_worker_scope", default=None)
_SEED_STEP = 0x9E3779B1  # odd, so that 2**32 steps have distinct seeds


class WorkerScope(keras.StatelessScope):
    """Collects the changes that one or more steps of a Keras model would make.

    Variables are read from the servers, with two exceptions: metrics start at zero, and the states of seed generators
    depend on the number of the step. What a step assigns is visible to its later reads and to nobody else; the same
    holds for the updates of optimizers (`push`).

    Attributes:
        bytes_pulled: Payload bytes of the variables that were read.
        rows_bytes_pulled: Payload bytes of the rows that were looked up, int64 scalars.
        pull_dtype: As which dtype trainable float32 variables cross the network; `None`: unchanged.
        loss_step: How the losses of the present step are scaled.
    """

    def __init__(
        self,
        metrics: Sequence[keras.Variable],
        number: tf.Tensor,
        pull_dtype: tf.DType | None,
        *,
        jit_compile: bool = False,
    ) -> None:
        """Creates a scope without changes.

        Args:
            metrics: The variables of the model's metrics.
            number: Of the step in this training, an int64 scalar.
            pull_dtype: As which dtype trainable float32 variables cross the network; `None`: unchanged.
            jit_compile: Whether XLA compiles the calls of layers and losses.
        """
        zeros = [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in metrics]
        super().__init__(zeros, collect_losses=True, initialize_variables=False)
        self.bytes_pulled = 0
        self.rows_bytes_pulled: list[tf.Tensor] = []
        self._read: set[int] = set()
        self.pull_dtype = pull_dtype
        self._metrics = {id(variable) for variable in metrics}
        self._number = number
        self._changed: dict[int, keras.Variable] = {}
        self._constrained: set[int] = set()
        self._before: dict[int, tf.Tensor] = {}
        self._graph = tf.compat.v1.get_default_graph()
        self._jit_compile = jit_compile
        self._pushed: list[list[tuple[Any, list[Any]]]] = []
        self.loss_step: LossStep | None = None

    @staticmethod
    def current() -> "WorkerScope | None":
        """The scope of the step that is being traced, if there is one."""
        return _current.get()

    @staticmethod
    def compiles_calls() -> bool:
        """Whether XLA compiles the calls of layers and losses here: in a step, not in a loop or branch of it."""
        scope = _current.get()
        return scope is not None and scope._jit_compile and scope._graph is tf.compat.v1.get_default_graph()

    @contextmanager
    def step(self, loss_step: LossStep | None = None) -> Iterator[None]:
        """Encloses one step of the model; `loss_step` says how its losses are scaled."""
        self._pushed.append([])
        self.loss_step = loss_step
        self.losses: list[Any] = []  # what layers add by `add_loss`
        self._read = set()
        self._constrained = set()
        token = _current.set(self)
        try:
            with self:
                yield
        finally:
            _current.reset(token)

    # What Keras and the optimizers call during a step.

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Returns the value of `variable` in this scope; `None`: read it from the server."""
        if is_in_compiled_function():
            raise ValueError(
                "XLA cannot compile on a worker what reads variables of the servers. Received: a "
                f"`tf.function(jit_compile=True)` that uses {variable.path!r}. Expected: functions of their arguments. "
                "Leave out `jit_compile=True` there, and compile the model with "
                "`model.compile(..., jit_compile=True)`, or decorate its `train_step` as a whole: then the workers "
                "compile its layers."
            )
        known = super().get_current_value(variable)
        if known is not None:
            return known
        if is_seed_state(variable):
            value = tf.convert_to_tensor(server_variable(variable))
            seed = tf.cast(tf.bitwise.bitwise_and(self._number * _SEED_STEP, 0xFFFFFFFF), value.dtype)
            self.state_mapping[id(variable)] = seeded = tf.stack([value[0] + seed, value[1]])
            return seeded
        self._count(variable)
        if self._is_pulled_as_less(variable):
            return pull_as(server_variable(variable), self.pull_dtype)
        if not variable.trainable and tf.compat.v1.get_default_graph() is self._graph:
            # Read once, so that a step's change is the difference to the value that the step has read.
            value = server_variable(variable).read_value()
            self.state_mapping[id(variable)] = self._before[id(variable)] = value
            return value
        if variable.regularizer is not None:  # Keras passes the returned value to it
            return pull_as(server_variable(variable), _dtype_of(variable))
        return None

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Collects what is assigned to a variable."""
        variable, value = update
        if id(variable) in self._constrained:
            return  # a constraint on the value before the update; `OptimizerUpdate.constrain` applies it after that
        super().add_update((variable, tf.cast(value, _dtype_of(variable))))
        if id(variable) not in self._metrics and not is_seed_state(variable):
            self._changed[id(variable)] = variable

    def push(self, optimizer: Any, gradients: list[Any]) -> None:
        """Collects the gradients that an optimizer is given."""
        self._pushed[-1].append((optimizer, gradients))
        self._constrained |= {id(variable) for variable in optimizer.constrained_variables}

    def count_rows(self, table: keras.Variable, ids: tf.Tensor, row_bytes: int) -> None:
        """Counts the bytes of rows that are looked up in `table`, which is not pulled itself."""
        self._read.add(id(table))
        self.rows_bytes_pulled.append(tf.size(ids, out_type=tf.int64) * row_bytes)

    # What the steps have computed.

    @property
    def pushed(self) -> list[list[tuple[Any, list[Any]]]]:
        """By step, the optimizers and their gradients, in order."""
        return self._pushed

    def changes(self, excluded: Sequence[tf.Variable]) -> list[tuple[tf.Variable, tf.Tensor]]:
        """The servers' variables that the steps would change, and by how much, without those in `excluded`."""
        known = {id(variable) for variable in excluded}
        found = []
        for variable in self._changed.values():
            server = server_variable(variable)
            if id(server) not in known:
                after = tf.cast(self.state_mapping[id(variable)], server.dtype)
                before = self._before.get(id(variable))
                found.append((server, after - (server.read_value() if before is None else before)))
        return found

    def mean_values(self, means: Sequence[tuple[keras.Variable, keras.Variable]]) -> list[Any]:
        """The values of the variables (total, count) of means."""
        return [tuple(tf.convert_to_tensor(self.get_current_value(variable)) for variable in mean) for mean in means]

    def weigh_means(
        self, weight: Any, means: Sequence[tuple[keras.Variable, keras.Variable]], before: list[Any]
    ) -> None:
        """Makes what a step has added to means over batches count as `weight` batches.

        Args:
            weight: A float scalar, the fraction of the batch in this step.
            means: The variables (total, count) of each mean, to which the step has added its part as one batch.
            before: The values of these variables before the step.
        """
        for (total, count), (total_before, count_before) in zip(means, before, strict=True):
            sum_of_step, count_of_step = (
                tf.convert_to_tensor(self.get_current_value(variable)) - value
                for variable, value in ((total, total_before), (count, count_before))
            )
            mean = tf.math.divide_no_nan(sum_of_step, count_of_step)
            part = tf.cast(weight, mean.dtype)
            self.add_update((total, total_before + part * mean))
            self.add_update((count, count_before + part))

    def _is_pulled_as_less(self, variable: keras.Variable) -> bool:
        return self.pull_dtype is not None and variable.trainable and _dtype_of(variable) == tf.float32

    def _count(self, variable: keras.Variable) -> None:
        if id(variable) not in self._read:
            self._read.add(id(variable))
            size = _dtype_of(variable).size
            if self.pull_dtype is not None and self._is_pulled_as_less(variable):
                size = self.pull_dtype.size
            self.bytes_pulled += (tf.TensorShape(variable.shape).num_elements() or 0) * size


def _dtype_of(variable: keras.Variable) -> tf.DType:
    """The dtype of the server's variable; `variable.dtype` is that of the computation while a layer is called."""
    server = server_variable(variable)
    return tf.as_dtype(variable.dtype) if server is None else server.dtype


def current_loss_step() -> LossStep | None:
    """How the losses of the step that is being traced are scaled; `None` outside of a step."""
    scope = _current.get()
    return None if scope is None else scope.loss_step
