"""The part of a client in a round: it makes local steps on copies of the variables and returns their difference."""

import contextvars
import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.local_copies import InitialSlots, LocalCopies
from tfdist.keras_internals.model_introspection import first_input
from tfdist.keras_internals.optimizers import OptimizerUpdate
from tfdist.keras_internals.scheduled_training import update_counter
from tfdist.parameter_server.worker_step import StepResult
from tfdist.tensorflow_internals.xla_functions import inlined
from tfdist.utils.temporary_values import setting

_current: contextvars.ContextVar["LocalSteps | None"] = contextvars.ContextVar("tfdist_local_steps", default=None)


@dataclasses.dataclass(frozen=True)
class ClientInfo:
    """Describes a round to a client, packed into one tensor.

    >>> info = ClientInfo.unpack(ClientInfo(round=7, client=3, slot=1, buffer=2).pack())
    >>> int(info.round), int(info.client), int(info.slot), int(info.buffer)
    (7, 3, 1, 2)

    Attributes:
        round: Number of the round. Unpacked: an int64 scalar, as all.
        client: Number of the client.
        slot: Its number among the clients of its worker.
        buffer: The gradient buffer that it writes to.
    """

    round: Any
    client: Any
    slot: Any
    buffer: Any

    def pack(self) -> tf.Tensor:
        """Returns an int64 vector."""
        return tf.constant(dataclasses.astuple(self), tf.int64)

    @staticmethod
    def unpack(tensor: tf.Tensor) -> "ClientInfo":
        """Returns what was packed, as scalar tensors."""
        return ClientInfo(*tf.unstack(tensor, 4))


class LocalSteps:
    """The local steps that are being traced. They add the proximal term to gradients."""

    def __init__(self, model: keras.Model, copies: LocalCopies, proximal: float) -> None:
        self._optimizer, self._copies, self._proximal = model.optimizer, copies, proximal

    @staticmethod
    def current() -> "LocalSteps | None":
        """Returns the steps that are being traced, if there are any."""
        return _current.get()

    def gradients(self, update: OptimizerUpdate, gradients: Sequence[Any]) -> list[Any]:
        """Returns the gradients with that of the proximal term."""
        if update.optimizer is not self._optimizer:
            raise ValueError(
                "A client updates by the model's optimizer alone. Received: an update by another optimizer in "
                "`train_step`. Expected: the optimizer that was given to `compile`. Use another mode of "
                "ParameterServerStrategy for models with several optimizers."
            )
        if not self._proximal:
            return list(gradients)
        with_proximal_term = []
        for gradient, copy in zip(gradients, update.servers_variables, strict=True):
            moved = tf.cast(copy.read_value() - self._copies.initial_value(copy), gradient.dtype)
            with_proximal_term.append(tf.convert_to_tensor(gradient) + self._proximal * moved)
        return with_proximal_term


def train(
    model: keras.Model,
    iterator: Any,
    info: ClientInfo,
    strategy: Any,
    slots: InitialSlots,
    server_optimizer: Any,
    name: str,
) -> tuple[StepResult, tf.Tensor]:
    """Traces a client's part of a round. It changes no variable of the servers.

    A call of an earlier round, which runs again on a worker that was lost, makes no step. `slots` are the initial ones
    of the model's optimizer, and `name`, that of the memory of the copies, is unique to the model.

    Returns:
        The difference as gradients of `server_optimizer`, and whether it counts, a bool scalar: the round is the
        present one, and all values are finite.
    """
    mode, counter = strategy.mode, update_counter(model.optimizer)
    rounds = tf.cast(counter.read_value(), tf.int64)
    is_present = tf.equal(rounds, info.round)
    steps = tf.where(is_present, mode.local_steps, 0)
    number = info.round * mode.num_clients(strategy.num_workers) + info.client
    copies = LocalCopies(model, slots, number, strategy.pull_dtype, name)
    with copies.in_use(), setting(_current, LocalSteps(model, copies, mode.proximal)):
        samples, logs = _local_steps(model, iterator, steps)
    differences = []
    for variable in model.trainable_variables:
        before, after = copies.before_and_after(variable)
        differences.append(before - after)
    changes = [(key.deref(), after - before) for key, (before, after) in copies.changed().items()]
    is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(difference)) for difference in differences])
    if mode.clip_difference is not None:
        differences, _ = tf.clip_by_global_norm(differences, mode.clip_difference)
    result = StepResult(
        gradients=[differences],
        optimizers=[OptimizerUpdate(server_optimizer, model.trainable_variables)],
        changes=changes,
        metrics=copies.present(model.metrics_variables),
        logs=logs,
        samples=samples,
        updates=rounds,
        bytes_pulled=tf.constant(copies.bytes_pulled, tf.int64),
        num_normalizers=0,
    )
    return result, tf.logical_and(is_present, is_finite)


def _local_steps(model: keras.Model, iterator: Any, steps: tf.Tensor) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Returns the number of samples of all steps, and the logs of the last one."""

    def one_step() -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        batch = next(iterator)
        logs = inlined(model.train_step)(batch)
        rows = tf.shape(first_input(batch), out_type=tf.int64)[0]
        return rows, tf.nest.map_structure(tf.convert_to_tensor, logs if isinstance(logs, dict) else {})

    # Traced before the loop, which needs the dtypes and shapes of the logs.
    traced = tf.function(one_step, autograph=False).get_concrete_function()
    empty = tf.nest.map_structure(lambda log: tf.zeros(log.shape, log.dtype), traced.structured_outputs[1])

    def body(step: tf.Tensor, samples: tf.Tensor, _: Any) -> Any:
        rows, logs = traced()
        return step + 1, samples + rows, logs

    zero = tf.constant(0, tf.int64)
    _, samples, logs = tf.while_loop(
        lambda step, *_: step < steps, body, (tf.constant(0), zero, empty), parallel_iterations=1
    )
    return samples, logs
