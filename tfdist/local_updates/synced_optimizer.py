"""One optimizer whose updates are local: its anchors and counters, and what follows each of its updates."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives.all_reduce import ReplicaReduction
from tfdist.keras_internals.keras_updates import moving_averages, trained_variables
from tfdist.keras_internals.optimizers import OptimizerUpdate
from tfdist.local_updates.background_exchange import BackgroundExchange
from tfdist.local_updates.fragments import Fragment, SyncSchedule, assign, held_sums, new_fragments, read
from tfdist.local_updates.local_modes import LocalMode


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
        in_background: Callable[[Sequence[Fragment]], BackgroundExchange | None] = lambda fragments: None,
    ) -> None:
        """Creates anchors, outer optimizers and counters. Call this eagerly, in the scope of the strategy.

        The optimizer is built. `reduction` returns that of the replica that calls it, `in_background` the exchange of
        fragments while steps run; `None` if steps wait.

        Raises:
            ValueError: If there are fewer variables than fragments, or a variable cannot be averaged.
        """
        self._strategy, self._reduction = strategy, reduction
        self._kept_share = mode.kept_share
        self._averages = moving_averages(optimizer)
        self._constrained = OptimizerUpdate(optimizer, trained_variables(optimizer)).constrained_variables
        self.fragments = new_fragments(optimizer, mode)
        self.background = in_background(self.fragments)
        overlap_steps = mode.overlap_steps if self.background is not None else 0
        self.schedule = SyncSchedule(mode.sync_every, mode.fragments, overlap_steps)
        self.updates = tf.Variable(0, dtype=tf.int64, trainable=False, name="local_updates")
        self.fresh = tf.Variable(0.0, trainable=False, name="fresh_samples")
        self.samples = tf.Variable(tf.zeros([mode.fragments]), trainable=False, name="samples_of_fragments")
        self._held = held_sums(self.fragments) if mode.overlap_steps else []

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

        Args:
            same_workers: Whether weights and counters are those of this worker. Otherwise training continues with the
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
        self._reduction().count_update()
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
        replicas = self._strategy.num_replicas_in_sync
        if self._averages:
            context = tf.distribute.get_replica_context()
            values = [read(average) for average in self._averages]
            sums = context.all_reduce(tf.distribute.ReduceOp.SUM, values)
            for average, total in zip(self._averages, sums, strict=True):
                assign(self._strategy, average, total / tf.cast(replicas, total.dtype))
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
