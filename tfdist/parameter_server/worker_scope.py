"""The scope of a Keras step on a worker: reads variables and rows from the servers, and collects changes."""

import contextvars
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.placed_variables import held_variable
from tfdist.keras_internals.scheduled_training import is_seed_state
from tfdist.losses.loss_scaling import LossStep
from tfdist.tensorflow_internals.function_graphs import call_with
from tfdist.tensorflow_internals.server_variables import look_up_version, pull_as, send_as
from tfdist.tensorflow_internals.tensorflow_symbols import stop_recording
from tfdist.tensorflow_internals.xla_functions import CannotCompileError, is_compiling, is_in_compiled_function
from tfdist.utils.temporary_values import setting, setting_attributes

_current: contextvars.ContextVar["WorkerScope | None"] = contextvars.ContextVar("tfdist_worker_scope", default=None)
_SEED_STEP = 0x9E3779B1  # odd, so that 2**32 steps have distinct seeds


class PhaseEnded(BaseException):
    """Ends a step before it reads what its updates change. No `except Exception` of a model catches it."""


class StepUpdates:
    """Makes the updates of a phase of a step.

    A step that reads trainable variables after it has updated them, as the second part of a GAN's step does, has
    several phases. Each ends where the next one reads what the phase has changed.
    """

    def end_phase(self, number: int, pushed: list[tuple[Any, list[Any]]], changes: list[tuple[Any, Any]]) -> None:
        """Makes the updates that end phase `number`, from 0, or raises `PhaseEnded`.

        `changes` is what it has assigned to variables that optimizers update, as differences.
        """
        raise NotImplementedError

    def version(self, variable: tf.Variable, phase: int) -> tf.Variable:
        """Returns the server's variable with the value that `variable` has in a phase."""
        return variable

    def replaced(self, phase: int) -> list[tf.Variable]:
        """Returns the variables for which `version` returns others."""
        return []


class WorkerScope(keras.StatelessScope):
    """Collects the changes that one or more steps of a Keras model would make.

    Variables are read from the servers, with two exceptions: metrics start at zero, and the states of seed generators
    depend on the number of the step. What a step assigns is visible to its later reads and to nobody else. Updates of
    optimizers (`push`), and what is assigned to the same variables, are visible once `StepUpdates` has made them.

    Attributes:
        bytes_pulled: Payload bytes of the variables that were read.
        rows_bytes_pulled: Payload bytes of the rows that were looked up, int64 scalars.
        pull_dtype: As which dtype trainable float32 variables cross the network; `None`: unchanged.
        first_metric_values: The tensors at which metrics start.
        loss_step: How the losses of the present step are scaled.
        pushed: By step, the optimizers and their gradients, in order.
    """

    def __init__(
        self,
        metrics: Sequence[keras.Variable],
        number: tf.Tensor,
        pull_dtype: tf.DType | None,
        *,
        jit_compile: bool = False,
        updates: StepUpdates | None = None,
    ) -> None:
        """Creates a scope without changes, for a step whose number in this training is an int64 scalar.

        XLA compiles the calls of layers and losses if `jit_compile`. Without `updates` those of phases are not made.
        """
        zeros = [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in metrics]
        super().__init__(zeros, collect_losses=True, initialize_variables=False)
        self.bytes_pulled = 0
        self.rows_bytes_pulled: list[tf.Tensor] = []
        self._read: set[int] = set()
        self.pull_dtype = pull_dtype
        self._metrics = {id(variable) for variable in metrics}
        self.first_metric_values = [self.state_mapping[id(variable)] for variable in metrics]
        self._number = number
        self._changed: dict[int, keras.Variable] = {}
        self._constrained: set[int] = set()
        self._before: dict[int, tuple[keras.Variable, tf.Tensor]] = {}  # what was read once
        self._graph = tf.compat.v1.get_default_graph()
        self._jit_compile = jit_compile
        self._updates = updates
        self._phase = 0
        self._updated: set[int] = set()  # variables that the optimizers of the step update
        self._stale: set[int] = set()  # those that the present phase updates or assigns
        self._started_at = self._updated_at = 0  # the numbers of operations when the phase and its update began
        self._is_in_update = False
        self._counters: set[int] = set()
        self.pushed: list[list[tuple[Any, list[Any]]]] = []
        self.loss_step: LossStep | None = None

    @staticmethod
    def current() -> "WorkerScope | None":
        """Returns the scope of the step that is being traced, if there is one."""
        return _current.get()

    @staticmethod
    def compiles_calls() -> bool:
        """Returns whether XLA compiles calls of layers and losses here: in a step, not in a loop or branch of it."""
        scope = _current.get()
        return scope is not None and scope._jit_compile and scope._graph is tf.compat.v1.get_default_graph()

    @contextmanager
    def step(self, loss_step: LossStep | None = None) -> Iterator[None]:
        """Encloses one step of the model; `loss_step` says how its losses are scaled."""
        self.pushed.append([])
        self.loss_step = loss_step
        self.losses: list[Any] = []  # what layers add by `add_loss`
        self._read = set()
        # Micro-steps are one step: each begins with the trainable variables of the servers.
        self._updated |= {key for key, variable in self._changed.items() if variable.trainable}
        self._forget_assigned()
        self._phase, self._stale, self._updated = 0, set(), set()
        self._started_at = len(self._graph.get_operations())
        with setting(_current, self), self:
            yield
            self._check_calls()

    @contextmanager
    def in_update(self) -> Iterator[None]:
        """Encloses the call of an optimizer, which may read the variables that it updates."""
        was_in_update, self._is_in_update = self._is_in_update, True
        try:
            yield
        finally:
            self._is_in_update = was_in_update
            if not was_in_update:
                self._constrained = set()

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
        self._end_phase_before_reading(variable)
        value_in_scope = super().get_current_value(variable)
        if value_in_scope is not None:
            return value_in_scope
        if is_seed_state(variable):
            value = tf.convert_to_tensor(held_variable(variable))
            seed = tf.cast(tf.bitwise.bitwise_and(self._number * _SEED_STEP, 0xFFFFFFFF), value.dtype)
            self.state_mapping[id(variable)] = seeded = tf.stack([value[0] + seed, value[1]])
            return seeded
        self._count(variable)
        source = self.version_of(variable)
        if variable.trainable and source is not None:
            return pull_as(held_variable(variable), self._pulled_dtype(variable), source)
        if self._is_pulled_as_less(variable):
            return pull_as(held_variable(variable), self.pull_dtype)
        if not variable.trainable and tf.compat.v1.get_default_graph() is self._graph:
            # Read once, so that a step's change is the difference to the value that the step has read.
            value = (held_variable(variable) if source is None else source).read_value()
            self.state_mapping[id(variable)] = value
            self._before[id(variable)] = variable, value
            return value
        if variable.regularizer is not None:  # Keras passes the returned value to it
            return pull_as(held_variable(variable), _dtype_of(variable))
        return None

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Collects what is assigned to a variable."""
        variable, value = update
        if id(variable) in self._constrained:
            return  # a constraint on the value before the update; `OptimizerUpdate.constrain` applies it after that
        self._end_phase_before_reading(variable)  # an assignment after an update
        super().add_update((variable, tf.cast(value, _dtype_of(variable))))
        if id(variable) not in self._metrics and not is_seed_state(variable):
            self._changed[id(variable)] = variable
            if id(variable) in self._updated and not self._is_in_update:
                self._stale.add(id(variable))

    def push(self, optimizer: Any, gradients: list[Any]) -> None:
        """Collects the gradients that an optimizer is given."""
        updated = {id(variable) for variable in optimizer.variables}
        self._updated |= updated
        if self._updates is not None and updated & self._changed.keys():
            self._end_phase()  # an update after an assignment
        self.pushed[-1].append((optimizer, gradients))
        self._counters.add(id(optimizer.counter))  # the update counts
        if not self._stale:
            self._updated_at = len(self._graph.get_operations())
        self._stale |= updated
        self._constrained |= {id(variable) for variable in optimizer.constrained_variables}

    def version_of(self, variable: keras.Variable) -> tf.Variable | None:
        """Returns the server's variable with the value of `variable` in this phase; `None`: that is its own one."""
        self._end_phase_before_reading(variable)
        server = held_variable(variable)
        if self._updates is None or server is None:
            return None
        source = self._updates.version(server, self._phase)
        if source is server:
            return None
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise ValueError(
                "A step reads a variable within a condition, a loop or a nested function, and later another value of "
                f"it that an update has made. Received: {variable.path}. Expected: reads outside of them, or one "
                "update in a step. Use `unroll=True` in recurrent layers, or MultiWorkerMirroredStrategy."
            )
        return source

    def count_rows(self, table: keras.Variable, ids: tf.Tensor, row_bytes: int) -> None:
        """Counts the bytes of rows that are looked up in `table`, which is not pulled itself."""
        self._read.add(id(table))
        self.rows_bytes_pulled.append(tf.size(ids, out_type=tf.int64) * row_bytes)

    # What the steps have computed.

    def changes(
        self, excluded: Sequence[tf.Variable] = (), *, of_phase: bool = False
    ) -> list[tuple[tf.Variable, tf.Tensor]]:
        """Returns the servers' variables that the steps would change, and by how much.

        Some are `excluded`, beside the optimizers' counts. `of_phase`: only those that optimizers update, too, which
        change at the end of each phase.
        """
        excluded_ids = {*map(id, excluded), *self._counters}
        differences = []
        for variable in self._changed.values():
            server = held_variable(variable)
            if id(server) not in excluded_ids and (id(variable) in self._updated or not of_phase):
                after = tf.cast(self.state_mapping[id(variable)], server.dtype)
                _, before = self._before.get(id(variable), (variable, None))
                differences.append((server, after - (server.read_value() if before is None else before)))
        return differences

    def mean_values(self, means: Sequence[tuple[keras.Variable, keras.Variable]]) -> list[Any]:
        """Returns the values of the variables (total, count) of means."""
        return [tuple(tf.convert_to_tensor(self.get_current_value(variable)) for variable in mean) for mean in means]

    def weigh_means(
        self, weight: Any, means: Sequence[tuple[keras.Variable, keras.Variable]], before: list[Any]
    ) -> None:
        """Makes what a step has added to means over batches count as `weight` batches, a float scalar.

        Means are their variables (total, count), of which `before` has the values before the step.
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

    def _end_phase_before_reading(self, variable: keras.Variable) -> None:
        if id(variable) in self._stale and not self._is_in_update and self._updates is not None:
            self._end_phase()

    def _end_phase(self) -> None:
        """Makes the updates on which the rest of the step depends, so that it reads the new values."""
        if self._updates is None:
            return
        self._check_calls()
        pushed = self.pushed[-1]
        super().__exit__(None, None, None)  # updates change variables
        try:
            with setting_attributes(self, _is_in_update=True), stop_recording(), self._graph.as_default():
                self._updates.end_phase(self._phase, pushed, self.changes(of_phase=True))
        finally:
            super().__enter__()
        self._phase += 1
        self._started_at = len(self._graph.get_operations())
        self._read -= self._stale
        self.pushed[-1], self._stale = [], set()
        self._forget_assigned()
        changed = {id(variable) for optimizer, _ in pushed for variable in optimizer.changed_variables}
        for key, (variable, _) in list(self._before.items()):
            if id(held_variable(variable)) in changed and key not in self._changed:
                del self.state_mapping[key], self._before[key]

    def _check_calls(self) -> None:
        """Checks that functions which keep what they read do not read other values than the phase has."""
        if self._updates is None:
            return
        updated = [variable for optimizer, _ in self.pushed[-1] for variable in optimizer.servers_variables]
        at = call_with([variable.handle for variable in updated], self._graph, self._updated_at) if updated else None
        if at is None:
            old = self._updates.replaced(self._phase)
            at = call_with([variable.handle for variable in old], self._graph, self._started_at) if old else None
        if at is not None:
            raise ValueError(
                "A step calls a function that reads variables, before and after an update of them. Received: a "
                f"`tf.function` in {at}. Expected: no `tf.function` in the step, as Keras makes one of the whole step. "
                "Remove the decorator."
            )

    def _forget_assigned(self) -> None:
        """Forgets what was assigned to variables that optimizers update: they are read again."""
        for key in list(self._changed):
            if key in self._updated:
                del self._changed[key], self.state_mapping[key]

    def _pulled_dtype(self, variable: keras.Variable) -> tf.DType:
        return self.pull_dtype if self._is_pulled_as_less(variable) else _dtype_of(variable)

    def _is_pulled_as_less(self, variable: keras.Variable) -> bool:
        return self.pull_dtype is not None and variable.trainable and _dtype_of(variable) == tf.float32

    def _count(self, variable: keras.Variable) -> None:
        if id(variable) not in self._read:
            self._read.add(id(variable))
            elements = tf.TensorShape(variable.shape).num_elements() or 0
            self.bytes_pulled += elements * self._pulled_dtype(variable).size


def _dtype_of(variable: keras.Variable) -> tf.DType:
    """The dtype of the server's variable; `variable.dtype` is that of the computation while a layer is called."""
    server = held_variable(variable)
    return tf.as_dtype(variable.dtype) if server is None else server.dtype


def current_loss_step() -> LossStep | None:
    """Returns how the losses of the step that is being traced are scaled; `None` outside of a step."""
    scope = _current.get()
    return None if scope is None else scope.loss_step


def look_up(parts: Sequence[keras.Variable], ids: tf.Tensor) -> tf.Tensor | None:
    """Looks up each distinct row once, on the server of its part; only these rows cross the network.

    The parts have the table's rows in order. If they are uneven, the first parts have one row more. The row numbers
    `ids` are int32 or int64 of any shape, which the shape of the result begins with. Returns None while Keras builds a
    layer by a call, in which the table has a shape and no value yet.
    """
    if any(held_variable(part) is None for part in parts):
        return None
    if is_compiling():  # rows are looked up on the servers
        raise CannotCompileError
    unique, positions = tf.unique(tf.reshape(ids, [-1]))
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + part.shape[0])
    places, rows_of_parts = [], []
    for part, start, end in zip(parts, starts, starts[1:], strict=False):
        here = tf.where((unique >= start) & (unique < end))[:, 0] if len(parts) > 1 else None
        local = unique if here is None else tf.gather(unique, here) - start
        rows_of_parts.append(_rows(part, local))
        places.append(here)
    if len(parts) == 1:
        rows = rows_of_parts[0]
    else:
        rows = tf.dynamic_stitch([tf.cast(place, tf.int32) for place in places], rows_of_parts)
    rows = tf.gather(rows, positions)
    rows = tf.reshape(rows, tf.concat([tf.shape(ids), tf.shape(rows)[1:]], 0))
    step = current_loss_step()
    if step is not None:
        step.mark_samples(rows, ids)
    return rows


def num_parts(partitioner: object, shape: tuple[int, int]) -> int:
    """Returns into how many parts a table is split by its rows."""
    if not callable(partitioner):
        return 1
    parts = partitioner(shape=tf.TensorShape(shape), dtype=tf.float32)
    if not parts or parts[0] < 1 or any(part != 1 for part in parts[1:]):
        raise ValueError(
            f"A table is split by its rows. Received: {parts} from variable_partitioner for a table of {shape}. "
            "Expected: a number of at least 1, then ones, as tf.distribute.experimental.partitioners return."
        )
    return min(int(parts[0]), shape[0])


def _rows(part: keras.Variable, ids: tf.Tensor) -> tf.Tensor:
    variable, scope = held_variable(part), WorkerScope.current()
    source = None if scope is None else scope.version_of(part)
    if source is None:
        with tf.device(variable.device):
            rows = tf.nn.embedding_lookup(variable, ids)
    else:
        rows = look_up_version(variable, source, ids)
    dtype = rows.dtype
    if scope is not None and scope.pull_dtype is not None and dtype == tf.float32:
        dtype = scope.pull_dtype
        rows = send_as(rows, variable.device, dtype)
    if scope is not None:
        scope.count_rows(part, ids, dtype.size * (part.shape[1:].num_elements() or 0))
    return rows
