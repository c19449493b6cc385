"""What a Keras step does on a worker: it reads variables of the servers, and changes none of them."""

import contextvars
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.losses import LossStep
from tfdist.keras_internals.scheduled_training import is_seed, server_variable
from tfdist.tensorflow_internals.parameter_server import pulled

_current: contextvars.ContextVar["WorkerScope | None"] = contextvars.ContextVar("tfdist_worker_scope", default=None)
_SEED_STEP = 0x9E3779B1  # odd, so that 2**32 steps have seeds of their own


class WorkerScope(keras.StatelessScope):
    """Collects the changes that one or more steps of a Keras model would make.

    Variables are read from the servers as ever, but for the metrics, which begin at zero, and the states of seed
    generators, which depend on the number of the step. What a step assigns is seen by what it reads after that, and is
    otherwise kept back; so are the updates of optimizers (`push`).
    """

    def __init__(self, metrics: Sequence[keras.Variable], number: tf.Tensor, pull_dtype: tf.DType | None) -> None:
        """Begins with no changes.

        Args:
          metrics: the variables of the model's metrics.
          number: of the step in this training, an int64 scalar.
          pull_dtype: as which trainable float32 variables cross the network; `None`: as they are.
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
        self._pushed: list[list[tuple[Any, list[Any]]]] = []
        self.loss_step: LossStep | None = None

    @staticmethod
    def current() -> "WorkerScope | None":
        """The scope of the step that is being traced, if there is one."""
        return _current.get()

    @contextmanager
    def step(self, loss_step: LossStep | None = None) -> Iterator[None]:
        """One step of the model runs in this; `loss_step` says how its losses weigh in a larger batch."""
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

    def get_current_value(self, variable: keras.Variable) -> Any:
        """What `variable` is in this scope; `None`: what the server has."""
        known = super().get_current_value(variable)
        if known is not None:
            return known
        if is_seed(variable):
            value = tf.convert_to_tensor(server_variable(variable))
            seed = tf.cast(tf.bitwise.bitwise_and(self._number * _SEED_STEP, 0xFFFFFFFF), value.dtype)
            self.state_mapping[id(variable)] = seeded = tf.stack([value[0] + seed, value[1]])
            return seeded
        self._count(variable)
        if self.pull_dtype is not None and variable.trainable and variable.dtype == "float32":
            return pulled(server_variable(variable), self.pull_dtype)
        if not variable.trainable and tf.compat.v1.get_default_graph() is self._graph:
            # Read once, so that what a step changes is counted from what it has seen.
            value = server_variable(variable).read_value()
            self.state_mapping[id(variable)] = self._before[id(variable)] = value
            return value
        if variable.regularizer is not None:  # Keras gives it what this returns
            return pulled(server_variable(variable), tf.as_dtype(variable.dtype))
        return None

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Takes what is assigned to a variable."""
        variable, value = update
        if id(variable) in self._constrained:
            return  # a constraint on the value before the update; `OptimizerUpdate.constrain` has the one after
        super().add_update((variable, tf.cast(value, variable.dtype)))
        if id(variable) not in self._metrics and not is_seed(variable):
            self._changed[id(variable)] = variable

    def push(self, optimizer: Any, gradients: list[Any]) -> None:
        """Takes the gradients that an optimizer is given."""
        self._pushed[-1].append((optimizer, gradients))
        self._constrained |= {id(variable) for variable in optimizer.constrained_variables}

    @property
    def pushed(self) -> list[list[tuple[Any, list[Any]]]]:
        """By step, the optimizers and their gradients, in order."""
        return self._pushed

    def changes(self, aside: Sequence[tf.Variable]) -> list[tuple[tf.Variable, tf.Tensor]]:
        """Variables of the servers, and by how much the steps would change them; but for those in `aside`."""
        known = {id(variable) for variable in aside}
        found = []
        for variable in self._changed.values():
            server = server_variable(variable)
            if id(server) not in known:
                after = tf.cast(self.state_mapping[id(variable)], server.dtype)
                before = self._before.get(id(variable))
                found.append((server, after - (server.read_value() if before is None else before)))
        return found

    def count_as(self, share: Any, means: Sequence[tuple[keras.Variable, keras.Variable]], before: list[Any]) -> None:
        """Makes what a step has added to means over batches count as `share` of a batch.

        Args:
          share: a float scalar.
          means: the variables (total, count) of each; counted by the step as if its part were a batch.
          before: the values that they had before the step.
        """
        for (total, count), (total_before, count_before) in zip(means, before, strict=True):
            sum_of_step, count_of_step = (
                tf.convert_to_tensor(self.get_current_value(variable)) - value
                for variable, value in ((total, total_before), (count, count_before))
            )
            mean = tf.math.divide_no_nan(sum_of_step, count_of_step)
            part = tf.cast(share, mean.dtype)
            self.add_update((total, total_before + part * mean))
            self.add_update((count, count_before + part))

    def values_of(self, means: Sequence[tuple[keras.Variable, keras.Variable]]) -> list[Any]:
        """The values of the variables (total, count) of means."""
        return [tuple(tf.convert_to_tensor(self.get_current_value(variable)) for variable in mean) for mean in means]

    def note_rows(self, table: keras.Variable, ids: tf.Tensor, row_bytes: int) -> None:
        """Counts rows that are pulled of `table`, which as a whole is not."""
        self._read.add(id(table))
        self.rows_bytes_pulled.append(tf.size(ids, out_type=tf.int64) * row_bytes)

    def _count(self, variable: keras.Variable) -> None:
        if id(variable) not in self._read:
            self._read.add(id(variable))
            size = tf.as_dtype(variable.dtype).size
            if self.pull_dtype is not None and variable.trainable and variable.dtype == "float32":
                size = self.pull_dtype.size
            self.bytes_pulled += (tf.TensorShape(variable.shape).num_elements() or 0) * size


def current_loss_step() -> LossStep | None:
    """How the losses weigh of the step that is being traced, if there is one."""
    scope = _current.get()
    return None if scope is None else scope.loss_step
