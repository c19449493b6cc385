"""The groups of an optimizer's variables that are exchanged together, and when: anchors, outer optimizers, schedule."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.keras_updates import features_of_steps, trained_variables
from tfdist.keras_internals.optimizers import OptimizerUpdate
from tfdist.local_updates.local_modes import DiLoCo, LocalMode
from tfdist.tensorflow_internals.tensorflow_symbols import ResourceVariable


@dataclasses.dataclass(frozen=True)
class SyncSchedule:
    """Which fragment is exchanged after which update since all weights were equal.

    >>> schedule = SyncSchedule(sync_every=10, fragments=2, overlap_steps=3)
    >>> [(update, schedule.sent_after(update)) for update in range(1, 21) if schedule.sent_after(update) is not None]
    [(5, 0), (10, 1), (15, 0), (20, 1)]
    >>> [(update, schedule.used_after(update)) for update in range(1, 21) if schedule.used_after(update) is not None]
    [(8, 0), (13, 1), (18, 0)]
    >>> schedule.under_way(5), schedule.under_way(7), schedule.under_way(8), schedule.under_way(12)
    ([0], [0], [], [1])

    Attributes:
        sync_every: The number of updates from one exchange of a fragment to the next.
        fragments: The number of fragments.
        overlap_steps: The number of updates from the start of an exchange to the use of its sum.
    """

    sync_every: int
    fragments: int = 1
    overlap_steps: int = 0

    @property
    def turns(self) -> list[int]:
        """The fragments that are sent after the updates, by the number of the update modulo `sync_every`; -1 for none.

        >>> SyncSchedule(sync_every=5, fragments=2).turns
        [1, -1, 0, -1, -1]
        """
        turns = [-1] * self.sync_every
        for fragment in range(self.fragments):
            turns[((fragment + 1) * self.sync_every // self.fragments) % self.sync_every] = fragment
        return turns

    def sent_after(self, update: int) -> int | None:
        """Returns the fragment that is sent after an update, counted from 1."""
        fragment = self.turns[update % self.sync_every]
        return fragment if update > 0 and fragment >= 0 else None

    def used_after(self, update: int) -> int | None:
        """Returns the fragment whose sum is used after an update."""
        return self.sent_after(update - self.overlap_steps)

    def under_way(self, update: int) -> list[int]:
        """Returns the fragments that were sent and not used, in the order in which they were sent."""
        sent = [self.sent_after(earlier) for earlier in range(update - self.overlap_steps + 1, update + 1)]
        return [fragment for fragment in sent if fragment is not None]

    def leaves_equal_weights(self, update: int) -> bool:
        """Whether all weights are equal on all workers after an update, if workers keep no share of their weights."""
        return update == 0 or (self.fragments == 1 and not self.overlap_steps and update % self.sync_every == 0)


def split_by_bytes(nbytes: Sequence[int], fragments: int) -> list[list[int]]:
    """Splits variables into groups of about equal bytes: the largest ones first, each to the smallest group.

    Returns positions, in order. There are at most as many groups as variables.

    >>> split_by_bytes([8, 1, 6, 2, 1], 2)
    [[0, 1], [2, 3, 4]]
    """
    groups: list[list[int]] = [[] for _ in range(fragments)]
    totals = [0] * fragments
    for position in sorted(range(len(nbytes)), key=lambda position: -nbytes[position]):
        smallest = min(range(fragments), key=lambda group: (totals[group], len(groups[group])))
        groups[smallest].append(position)
        totals[smallest] += nbytes[position]
    return [sorted(group) for group in groups]


@dataclass(frozen=True)
class Fragment:
    """Variables that are exchanged together.

    Attributes:
        variables: The trained variables.
        anchors: Their shared values, float32, equal on all workers.
        outer: The optimizer that updates the anchors; `None`: they become the mean of the workers' weights.
        paths: The unique paths of the variables, under which compressors keep their state.
    """

    variables: list[Any]
    anchors: list[Any]
    outer: Any
    paths: list[str]


def new_fragments(optimizer: Any, mode: LocalMode) -> list[Fragment]:
    """Splits the variables of a built optimizer. Call this eagerly, in the scope of the strategy.

    Raises:
        ValueError: If there are fewer variables than fragments, or a variable cannot be averaged.
    """
    variables = trained_variables(optimizer)
    if mode.fragments > len(variables):
        raise ValueError(
            f"There are more fragments than variables. Received: fragments={mode.fragments} and an optimizer of "
            f"{len(variables)} variables. Expected: at most as many fragments. Lower `fragments`."
        )
    paths = OptimizerUpdate(optimizer, variables).paths
    groups = split_by_bytes([_nbytes(variable) for variable in variables], mode.fragments)
    return [_new_fragment([variables[i] for i in group], [paths[i] for i in group], mode) for group in groups]


def held_sums(fragments: Sequence[Fragment]) -> list[list[tf.Variable]]:
    """Returns variables on the host for the sums of each fragment."""
    with tf.device("CPU:0"):
        return [
            [ResourceVariable(tf.zeros(anchor.shape), trainable=False, name="held_sum") for anchor in fragment.anchors]
            for fragment in fragments
        ]


def _new_fragment(variables: list[Any], paths: list[str], mode: LocalMode) -> Fragment:
    anchors = [
        keras.Variable(
            shape=variable.shape, initializer="zeros", dtype="float32", autocast=False, name=f"anchor_{number}"
        )
        for number, variable in enumerate(variables)
    ]
    outer = None
    if isinstance(mode, DiLoCo):
        described = mode.outer_optimizer
        outer = _new_outer_optimizer(_default_outer if described is None else described, anchors)
    return Fragment(variables, anchors, outer, paths)


def _new_outer_optimizer(described: Any, anchors: Sequence[Any]) -> Any:
    """Returns a new optimizer that is built for `anchors`.

    `described` is an optimizer, whose configuration is used, a function that returns one, or what
    `keras.optimizers.get` accepts.

    Raises:
        ValueError: If `described` is none of these, or the optimizer cannot be an outer one.
    """
    is_function = callable(described) and not isinstance(described, keras.optimizers.Optimizer)
    identifier = described() if is_function else described
    if not isinstance(identifier, keras.optimizers.Optimizer | str | dict):
        raise ValueError(
            f"Invalid `outer_optimizer`. Received: {described!r}. Expected: a function that returns a Keras optimizer, "
            "such as `lambda: keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)`, a name, or a configuration."
        )
    if isinstance(identifier, keras.optimizers.Optimizer):
        optimizer = type(identifier).from_config(identifier.get_config())
    else:
        optimizer = keras.optimizers.get(identifier)
    if extra := features_of_steps(optimizer):
        raise ValueError(
            f"Invalid `outer_optimizer`. Received: {type(optimizer).__name__} with {', '.join(extra)}. Expected: a "
            "Keras optimizer without: it updates once an exchange."
        )
    optimizer.build(list(anchors))
    return optimizer


def _default_outer() -> Any:
    return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)


def _nbytes(variable: Any) -> int:
    return int(tf.TensorShape(variable.shape).num_elements() or 0) * tf.as_dtype(variable.dtype).size


def read(variable: Any) -> tf.Tensor:
    """Returns this replica's value of a `keras.Variable` or `tf.Variable`."""
    return tf.convert_to_tensor(getattr(variable, "value", variable) if _is_keras(variable) else variable)


def assign(strategy: Any, variable: Any, value: Any) -> None:
    """Assigns `value` to this replica's copy of a variable, cast to its dtype."""
    held = variable.value if _is_keras(variable) else variable
    strategy.extended.update(held, _assign, args=(value,), group=False)


def _assign(variable: tf.Variable, value: Any) -> None:
    variable.assign(tf.cast(value, variable.dtype))


def _is_keras(variable: Any) -> bool:
    return not isinstance(variable, tf.Variable | tf.distribute.DistributedValues)
