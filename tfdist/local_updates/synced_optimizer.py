"""One optimizer whose updates are local: its fragments, their anchors and schedule, and what follows each update."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives.all_reduce import ReplicaReduction
from tfdist.keras_internals.keras_updates import (
    exchanged_variables,
    features_of_steps,
    moving_averages,
)
from tfdist.keras_internals.optimizers import OptimizerUpdate
from tfdist.local_updates.background_exchange import BackgroundExchange
from tfdist.local_updates.local_modes import DiLoCo, LocalMode
from tfdist.tensorflow_internals.tensorflow_symbols import ResourceVariable


@dataclass(frozen=True)
class SyncSchedule:
    """Which fragment is exchanged after which update since all weights were equal.

    >>> schedule = SyncSchedule(sync_every=10, fragments=2, overlap_steps=3)
    >>> [(update, schedule.sent_after(update)) for update in range(1, 21) if schedule.sent_after(update) is not None]
    [(5, 0), (10, 1), (15, 0), (20, 1)]
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


def new_fragments(update: OptimizerUpdate, mode: LocalMode) -> list[Fragment]:
    """Splits the variables of a built optimizer. Call this eagerly, in the scope of the strategy."""
    variables, paths = update.variables, update.paths
    if mode.fragments > len(variables):
        raise ValueError(
            f"There are more fragments than variables. Received: fragments={mode.fragments} and an optimizer of "
            f"{len(variables)} variables. Expected: at most as many fragments. Lower `fragments`."
        )
    groups = split_by_bytes([_nbytes(variable) for variable in variables], mode.fragments)
    return [_new_fragment([variables[i] for i in group], [paths[i] for i in group], mode) for group in groups]


def _new_fragment(variables: list[Any], paths: list[str], mode: LocalMode) -> Fragment:
    anchors = [
        keras.Variable(
            shape=variable.shape, initializer="zeros", dtype="float32", autocast=False, name=f"anchor_{number}"
        )
        for number, variable in enumerate(variables)
    ]
    outer = None
    if isinstance(mode, DiLoCo):
        default = functools.partial(keras.optimizers.SGD, 0.7, momentum=0.9, nesterov=True)
        outer = _new_outer_optimizer(default if mode.outer_optimizer is None else mode.outer_optimizer, anchors)
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


def _nbytes(variable: Any) -> int:
    return int(tf.TensorShape(variable.shape).num_elements() or 0) * tf.as_dtype(variable.dtype).size


def read(variable: Any) -> tf.Tensor:
    """Returns this replica's value of a `keras.Variable` or `tf.Variable`."""
    return tf.convert_to_tensor(_held(variable))


def assign(strategy: Any, variable: Any, value: Any) -> None:
    """Assigns `value` to this replica's copy of a variable, cast to its dtype."""
    strategy.extended.update(_held(variable), _assign, args=(value,), group=False)


def _assign(variable: tf.Variable, value: Any) -> None:
    variable.assign(tf.cast(value, variable.dtype))


def assign_means(strategy: Any, variables: Sequence[Any]) -> None:
    """Replaces the values of variables by their means over all replicas, of workers that are not lost."""
    if variables:
        context, values = tf.distribute.get_replica_context(), [read(variable) for variable in variables]
        replicas, *sums = context.all_reduce(tf.distribute.ReduceOp.SUM, [tf.ones([]), *values])
        for variable, total in zip(variables, sums, strict=True):
            assign(strategy, variable, total / tf.cast(replicas, total.dtype))


def _held(variable: Any) -> Any:
    is_held = isinstance(variable, tf.Variable | tf.distribute.DistributedValues)
    return variable if is_held else variable.value


class SyncedOptimizer:
    """The local updates of one optimizer. Except for `__init__`, call the methods in a replica context.

    Attributes:
        fragments: The variables in the groups in which they are exchanged.
        schedule: The updates after which they are exchanged.
        updates: The number of updates since all weights were equal, int64; the same on all workers.
        fresh: This worker's samples since its last update, float32.
        samples: Its samples since each fragment was sent, `[fragments]`, float32.
    """

    def __init__(
        self,
        optimizer: Any,
        mode: LocalMode,
        strategy: Any,
        reduction: Callable[[], ReplicaReduction],
        in_background: Callable[[Sequence[Fragment]], BackgroundExchange | None],
    ) -> None:
        """Creates anchors, outer optimizers and counters. Call this eagerly, in the scope of the strategy.

        The optimizer is built. `reduction` returns that of the replica that calls it, `in_background` the exchange of
        fragments while steps run; `None` if steps wait.
        """
        self._strategy, self._reduction = strategy, reduction
        self._kept_share = mode.kept_share
        self._averages = moving_averages(optimizer)
        update = OptimizerUpdate(optimizer, exchanged_variables(optimizer))
        self._constrained = update.constrained_variables
        self.fragments = new_fragments(update, mode)
        self.background = in_background(self.fragments)
        overlap_steps = mode.overlap_steps if self.background is not None else 0
        self.schedule = SyncSchedule(mode.sync_every, mode.fragments, overlap_steps)
        self.updates = tf.Variable(0, dtype=tf.int64, trainable=False, name="local_updates")
        self.fresh = tf.Variable(0.0, trainable=False, name="fresh_samples")
        self.samples = tf.Variable(tf.zeros([mode.fragments]), trainable=False, name="samples_of_fragments")
        with tf.device("CPU:0"):
            self._held = [
                [ResourceVariable(tf.zeros(anchor.shape), trainable=False, name="held_sum") for anchor in part.anchors]
                for part in self.fragments
                if mode.overlap_steps
            ]

    @property
    def shared_variables(self) -> dict[str, Any]:
        """The variables that are equal on all workers, by names: anchors, outer optimizers, sums copied by `hold`."""
        variables_by_name: dict[str, Any] = {}
        for number, fragment in enumerate(self.fragments):
            outer = [] if fragment.outer is None else fragment.outer.variables
            held = self._held[number] if self._held else []
            for kind, variables in (("anchor", fragment.anchors), ("outer", outer), ("sum", held)):
                variables_by_name |= {f"{number}/{kind}/{index}": variable for index, variable in enumerate(variables)}
        return variables_by_name

    @property
    def own_variables(self) -> dict[str, Any]:
        """The counters of each worker, by names."""
        return {"updates": self.updates, "fresh": self.fresh, "samples": self.samples}

    @property
    def flushed_variables(self) -> list[Any]:
        """All that `flush` and `finish` write, besides the state of compressors."""
        weights = [variable for fragment in self.fragments for variable in fragment.variables]
        return [*weights, *self._averages, *self.shared_variables.values(), *self.own_variables.values()]

    def number_of_updates(self) -> int:
        """Returns `updates`. Call this eagerly, outside of a replica."""
        return int(self._strategy.experimental_local_results(self.updates)[0].numpy())

    def hold(self) -> None:
        """Waits for exchanges that are under way, and copies their sums, to save them. Call this between two steps."""
        if self.background is not None:
            for number in self.schedule.under_way(self.number_of_updates()):
                sums = self.background.receive(number)
                for held, value in zip(self._held[number], sums, strict=True):
                    held.assign(value)
                self.background.give_back(number, sums)

    def resume(self, *, same_workers: bool) -> None:
        """Continues with restored variables, between two steps.

        With the `same_workers`, weights and counters are those of this worker. Otherwise training continues with the
        anchors, as the last exchange has left them, unless all weights were equal.
        """
        updates = self.number_of_updates()
        if same_workers:
            if self.background is not None:
                self.background.clear()
                for number in self.schedule.under_way(updates):
                    self.background.give_back(number, self._held[number])
            return
        for fragment in self.fragments if updates else ():
            for variable, anchor in zip(fragment.variables, fragment.anchors, strict=True):
                variable.assign(tf.cast(anchor.value, variable.dtype))
        for variable in self.own_variables.values():
            variable.assign(tf.zeros_like(variable))

    def count(self, samples: Any) -> None:
        """Counts the samples of a step of this worker, a number or a float32 scalar."""
        assign(self._strategy, self.fresh, read(self.fresh) + tf.cast(samples, tf.float32))

    def update(self, apply: Callable[[], None], *, is_certain: bool) -> None:
        """Runs an update by `apply`, and the exchanges that follow it.

        A worker that had no samples since the last update is left out, unless it is certain that it had some.
        """
        is_first = tf.equal(read(self.updates), 0)
        tf.cond(is_first, self._set_anchors, lambda: None)  # a program may have assigned weights
        if is_certain:
            apply()
        else:
            tf.cond(read(self.fresh) > 0, apply, lambda: None)
        number = read(self.updates) + 1
        assign(self._strategy, self.updates, number)
        assign(self._strategy, self.samples, read(self.samples) + read(self.fresh))
        assign(self._strategy, self.fresh, 0.0)
        self._reduction().counters.add_update()  # for which nothing is reduced
        if self.background is None:
            self._for_fragment(self._turn(number), lambda fragment: self._exchange(fragment, self._kept_share))
        else:
            self._for_fragment(self._turn(number - self.schedule.overlap_steps), self._receive)
            self._for_fragment(self._turn(number), self._send)

    def flush(self, under_way: Sequence[int]) -> None:
        """Makes all weights, and moving averages of weights, equal on all workers.

        The sums of the fragments that are `under_way`, in the order in which they were sent, are not used yet.
        """
        for number in under_way:
            self._receive(number)
        for number in range(len(self.fragments)):
            self._exchange(number, 0.0)
        for variable in self._constrained:
            assign(self._strategy, variable, variable.constraint(read(variable)))
        self.finish()

    def finish(self) -> None:
        """Makes moving averages equal on all workers, and starts to count updates from 0."""
        assign_means(self._strategy, self._averages)
        assign(self._strategy, self.updates, tf.zeros([], tf.int64))
        assign(self._strategy, self.samples, tf.zeros([len(self.fragments)]))

    def _for_fragment(self, number: tf.Tensor, do: Callable[[int], None]) -> None:
        """Calls `do` with the number of a fragment, or does nothing for -1."""
        branches: list[Callable[[], None]] = [lambda: None]
        branches += [lambda index=index: do(index) for index in range(len(self.fragments))]  # type: ignore[misc]
        tf.switch_case(number + 1, branches)

    def _turn(self, update: tf.Tensor) -> tf.Tensor:
        """Returns the number of the fragment that is sent after an update, or -1."""
        turn = tf.gather(tf.constant(self.schedule.turns), update % self.schedule.sync_every)
        return tf.where(update > 0, turn, -1)

    def _set_anchors(self) -> None:
        for fragment in self.fragments:
            for variable, anchor in zip(fragment.variables, fragment.anchors, strict=True):
                assign(self._strategy, anchor, read(variable))

    def _exchange(self, number: int, kept_share: float) -> None:
        fragment = self.fragments[number]
        samples, differences = self._take_differences(number)
        if self._strategy.num_workers == 1:
            self._use(number, differences, kept_share)
            return
        reduction = self._reduction()
        share = reduction.share_of_worker(samples)
        sums = reduction.sum_of_workers([difference * share for difference in differences], fragment.paths)
        self._use(number, sums, kept_share)

    def _send(self, number: int) -> None:
        samples, differences = self._take_differences(number)
        if self._reduction().is_first_of_worker:
            assert self.background is not None
            self.background.send(number, samples, differences)

    def _receive(self, number: int) -> None:
        assert self.background is not None
        reduction = self._reduction()
        if reduction.is_first_of_worker:
            sums = self.background.receive(number)
        else:
            sums = [tf.zeros(anchor.shape) for anchor in self.fragments[number].anchors]
        self._use(number, reduction.from_first_device(sums), self._kept_share)

    def _take_differences(self, number: int) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Returns this worker's samples, and the anchors minus its weights; the samples count from 0 again."""
        fragment = self.fragments[number]
        every = read(self.samples)
        assign(self._strategy, self.samples, tf.where(tf.range(len(self.fragments)) == number, 0.0, every))
        differences = [
            read(anchor) - tf.cast(read(variable), tf.float32)
            for variable, anchor in zip(fragment.variables, fragment.anchors, strict=True)
        ]
        return every[number], differences

    def _use(self, number: int, sums: Sequence[tf.Tensor], kept_share: float) -> None:
        """Updates the anchors by the mean differences, and the weights by the anchors."""
        fragment = self.fragments[number]
        if fragment.outer is not None:
            update = OptimizerUpdate(fragment.outer, fragment.anchors)
            update.clip_and_apply(list(sums), False)
            update.take_back(-1)
        else:
            for anchor, difference in zip(fragment.anchors, sums, strict=True):
                assign(self._strategy, anchor, read(anchor) - difference)
        for variable, anchor in zip(fragment.variables, fragment.anchors, strict=True):
            value = read(anchor)
            if kept_share:
                value = kept_share * tf.cast(read(variable), tf.float32) + (1 - kept_share) * value
            assign(self._strategy, variable, value)
