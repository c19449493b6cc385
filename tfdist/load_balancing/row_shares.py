"""The rows of a global batch that each worker computes, and how long they take: one small variable on each worker."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.load_balancing import share_planning as planning
from tfdist.load_balancing.share_planning import LoadBalancing
from tfdist.load_balancing.step_timer import StepTimer
from tfdist.tensorflow_internals.tensorflow_symbols import ResourceVariable

_OF_REPLICA = 3  # A report has as many numbers of each replica as `TimedStep.last`.


@dataclasses.dataclass(frozen=True)
class ShareStats:
    """What a worker has computed in measured training steps; the last step is missing.

    Attributes:
        share: Its present part of a batch, as a fraction.
        steps: Training steps.
        samples: Rows of their batches.
        seconds: How long its slowest device computed: from when the data was there to the last gradient, and updates.
        waited_seconds: How much earlier it was ready than the slowest worker.
    """

    share: float = 0.0
    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0

    def since(self, earlier: "ShareStats") -> "ShareStats":
        """The difference to `earlier`, with the present share.

        >>> ShareStats(0.25, 4, 32).since(ShareStats(0.5, 2, 24))
        ShareStats(share=0.25, steps=2, samples=8, seconds=0.0, waited_seconds=0.0)
        """
        difference = {f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in dataclasses.fields(self)}
        return ShareStats(**{**difference, "share": self.share})


class RowShares:
    """Divides the rows of global batches among the replicas of all workers.

    All workers hold equal values: what they measure is exchanged, and each computes the same shares from it.

    Attributes:
        measures: Whether times are measured. Where workers may be lost, and nobody has asked for shares, they are not:
            a step of few milliseconds would notice the clocks.
    """

    def __init__(
        self,
        devices: Sequence[int],
        rank: int,
        host: str,
        shares: Sequence[float] | None,
        options: LoadBalancing | None,
        *,
        process: int = 0,
    ) -> None:
        """Creates the variable on `host`, the CPU device of this worker, for workers with these numbers of `devices`.

        The first `shares` are changed to keep the limits of `options`; by default workers share by their numbers of
        devices. `options` say how shares follow the measured speeds; `None` if they are fixed. Where workers may be
        lost, this is the `process` of its rank, counted from 1, and `give_rows_to` is called.
        """
        self._devices, self._rank, self._options = tuple(devices), rank, options
        self._host = host
        first: Sequence[float] = shares or devices
        if options is not None:
            first = planning.within_limits(first, options.limits(len(devices)))
        self._process = process
        self._first = planning.whole_shares(first)
        with tf.init_scope(), tf.device(host):
            # Apart from the shares, which are equal on all workers, as a worker that joins repeats steps without rows.
            self._takes_rows = ResourceVariable(1, dtype=tf.int64, trainable=False, name="takes_rows")
            self._state = ResourceVariable(planning.initial_state(self._first), trainable=False, name="row_shares")
        self.measures = options is not None or shares is not None or not process
        self.timers = [StepTimer(host) for _ in range(devices[rank])] if self.measures else []

    def bounds(self, rows: int | tf.Tensor, *, is_filled: bool = False) -> list[tuple[Any, Any]]:
        """Returns the first row and the end of the rows of each local replica in a global batch of `rows`.

        They are ints if `rows` is one and the shares are fixed, otherwise int32 scalars. If they are to be filled, a
        worker that takes no rows has the first ones of the batch, one for each replica, as far as there are so many.
        """
        num_devices = self._devices[self._rank]
        if self._options is None and not self._process and isinstance(rows, int):
            first, end = planning.row_bounds(self._first, rows)[self._rank : self._rank + 2]
        else:
            with tf.device(self._host):
                shares = tf.cast(tf.convert_to_tensor(self._state)[planning.SHARE], tf.int64)
                total, count = tf.reduce_sum(shares), tf.cast(rows, tf.int64)
                before, own = tf.reduce_sum(shares[: self._rank]), shares[self._rank]
                if self._process:
                    own *= self._takes_rows
                ends = tf.stack([before, before + own])
                first, end = tf.unstack(tf.cast((ends * count + total // 2) // total, tf.int32))
                if self._process and is_filled:
                    takes = tf.cast(self._takes_rows, tf.int32)
                    first, end = (
                        first * takes,
                        end * takes + (1 - takes) * tf.minimum(num_devices, tf.cast(rows, tf.int32)),
                    )
        if num_devices == 1:
            return [(first, end)]
        ends_of_replicas = [first + index * (end - first) // num_devices for index in range(num_devices + 1)]
        return [*zip(ends_of_replicas, ends_of_replicas[1:], strict=False)]

    def report(self, replica: int, measured: tf.Tensor | None, rows: Any) -> tf.Tensor:
        """Returns what a replica reports in a step; the reports of all replicas are added up.

        `replica` counts over all workers. `measured` is the last step of this replica, as `TimedStep.last`; `None` in
        `evaluate`, or if nothing is measured.
        """
        own_rows = tf.reshape(tf.cast(rows, tf.float32), [1])
        if measured is None and self.measures:
            return own_rows
        parts = []
        if measured is not None:
            after = _OF_REPLICA * (sum(self._devices) - replica - 1)
            parts = [tf.zeros([_OF_REPLICA * replica]), measured, tf.zeros([after])]
        if self._process:  # says who computes the step
            is_first = replica == sum(self._devices[: self._rank])
            parts.append(tf.one_hot(self._rank, len(self._devices), float(self._process if is_first else 0)))
        return tf.concat([*parts, own_rows], axis=0)

    def add_step(self, report: tf.Tensor) -> None:
        """Stores the sum of the replicas' reports of a training step, and divides the rows again if it is time."""
        with tf.device(self._host):
            state = tf.convert_to_tensor(self._state)

            def after_step() -> tf.Tensor:
                changed = tf.numpy_function(self._after_step, [state, report], tf.float64, stateful=False)
                return tf.ensure_shape(changed, state.shape)

            if self.measures:
                self._state.assign(after_step())
            else:  # without a call of Python, unless other workers compute than before
                processes = tf.cast(report[: len(self._devices)], tf.float64)
                are_same = tf.reduce_all(tf.equal(processes, state[planning.PROCESS]))
                self._state.assign(tf.cond(are_same, lambda: tf.identity(state), after_step))

    def give_rows_to(self, workers: Sequence[int]) -> None:
        """Divides rows among some workers only, this one too. Call this eagerly.

        `workers` are numbers, of which the remainder by the number of ranks is the rank, and the quotient says which
        process of that rank it is, counted from 0.
        """
        processes, ranks = np.zeros(len(self._devices)), len(self._devices)
        for number in workers:
            processes[number % ranks] = number // ranks + 1
        self._state.assign(planning.among(self._state.numpy(), processes, self._first, self._options))
        self._takes_rows.assign(1)

    def take_no_rows(self) -> None:
        """Leaves rows to others until the next call of `give_rows_to`. Call this eagerly."""
        self._takes_rows.assign(0)

    @property
    def state(self) -> Any:
        """The variable."""
        return self._state

    def stats(self) -> tuple[ShareStats, ...]:
        """Returns what each worker has computed so far. Call this eagerly."""
        state = self._state.numpy()
        shares = state[planning.SHARE]
        numbers = state[[planning.STEPS, planning.ROWS, planning.SECONDS, planning.WAITED_SECONDS]].T.tolist()
        return tuple(
            ShareStats(float(share / shares.sum()), int(steps), int(rows), seconds, waited)
            for share, (steps, rows, seconds, waited) in zip(shares, numbers, strict=True)
        )

    def saved(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as JSON. Call this eagerly."""
        return {"devices": list(self._devices), "state": self._state.numpy().tolist()}

    def restore(self, saved: Any) -> None:
        """Restores what `saved` returned, unless the shares are fixed or the workers have other devices."""
        if self._options is not None and saved and saved["devices"] == list(self._devices):
            first = planning.initial_state(self._first)
            state = first.copy()
            state[: len(saved["state"])] = saved["state"]  # The state of an earlier tfdist has fewer rows.
            for row in (planning.IGNORED, planning.FASTEST_INTERVAL):  # The machines may be others.
                state[row] = first[row]
            if np.all(state[planning.SHARE] > 0):  # otherwise some workers were lost, which are here now
                self._state.assign(state)

    def _after_step(self, state: np.ndarray, report: np.ndarray) -> np.ndarray:
        if not self.measures:
            return planning.among(state, report[: len(self._devices)], self._first, self._options)
        of_replicas = report[: _OF_REPLICA * sum(self._devices)].reshape([-1, _OF_REPLICA]).astype(np.float64)
        first = np.cumsum([0, *self._devices[:-1]])
        seconds = np.maximum.reduceat(of_replicas[:, 0], first)
        rows = np.add.reduceat(of_replicas[:, 1], first)
        interval = float(np.max(of_replicas[:, 2]))
        if self._process:
            processes = report[_OF_REPLICA * sum(self._devices) :][: len(self._devices)]
            state = planning.among(state, processes, self._first, self._options)
        return planning.after_step(state, seconds, rows, interval, self._devices, self._options)
