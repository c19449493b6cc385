"""The chief's part of `fit`, `evaluate` and `predict`: gives batches to the workers, and takes what they return."""

from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.scheduled_training import count_of_updates
from tfdist.parameter_server.coordinator import Work
from tfdist.parameter_server.encoding import Encoder
from tfdist.parameter_server.functions import Functions
from tfdist.parameter_server.metric_sums import MetricSums
from tfdist.parameter_server.modes import Asynchronous, Synchronous
from tfdist.parameter_server.refusals import refuse_impossible
from tfdist.parameter_server.rows import split
from tfdist.parameter_server.slots import Slots, free_slots, shares
from tfdist.parameter_server.worker_datasets import WorkerIterator

_QUEUED_PER_WORKER = 2


class Training:
    """Trains one model under a parameter server strategy."""

    def __init__(self, model: keras.Model) -> None:
        """To be made once a model."""
        self._model = model
        self._strategy = strategy = model.distribute_strategy
        self._mode, self._workers = strategy.mode, strategy.workers
        self._work = Work(strategy.coordinator)
        self._sums = MetricSums(model)
        self._encoder = Encoder(strategy.policy, strategy.new_worker_variable)
        self._functions: Functions | None = None
        self._pending: list[Any] = []  # batches of the next push
        self._number: int | None = None
        spare = 2 if isinstance(self._mode, Synchronous) and self._mode.backup_workers else 1
        self._num_slots = spare * self._workers
        self._free = free_slots(self._num_slots)
        self._round = 0
        self._late: set[int] = set()  # slots of parts that their round has left out

    # What Keras calls.

    def train(self, iterator: Any) -> dict[str, Any]:
        """Takes the batches of an execution and returns the logs so far, of what has ended."""
        functions = self._prepared()
        for number in range(self._model.steps_per_execution):
            try:
                batch = iterator if isinstance(iterator, WorkerIterator) else next(iterator)
            except StopIteration:
                if number == 0:
                    raise
                break
            self._pending.append(batch)
            if len(self._pending) == self._strategy.accumulation_steps:
                self._send(functions)
        if not isinstance(iterator, tf.data.Iterator | WorkerIterator):  # `train_on_batch`
            self.wait()
            return self._sums.results()
        return self._results()

    def test(self, iterator: Any) -> dict[str, Any]:
        """As `train`, for `evaluate`."""
        functions = self._functions_of_model()
        for number in range(self._model.steps_per_execution):
            try:
                batch = next(iterator)
            except StopIteration:
                if number == 0:
                    raise
                break
            self._make_room()
            self._work.schedule(functions.test, (batch,))
        if not isinstance(iterator, tf.data.Iterator | WorkerIterator):
            self._finish_work()
        return self._results()

    def predict(self, batches: Any) -> Any:
        """The outputs for some batches, whose rows all workers share."""
        functions = self._functions_of_model()
        self._finish_work()
        outputs: dict[int, Any] = {}
        pieces = [piece for batch in batches for piece in split(batch, self._workers)]
        for number, piece in enumerate(pieces):
            self._work.schedule(functions.predict, (piece,), number)
        self._work.wait(lambda: len(outputs) == len(pieces), outputs.__setitem__)
        parts = [outputs[number] for number in range(len(pieces))]
        return tf.nest.map_structure(_concatenated, *parts)

    def begin(self) -> None:
        """Begins to count the metrics anew."""
        self._finish_work()
        self._sums.reset()

    def wait(self) -> None:
        """Waits until all that has been taken is trained on, and stores the metrics."""
        if self._pending and self._functions is not None:
            self._send(self._functions)
        self._finish_work()
        self._sums.store()

    def forget(self, name: str) -> None:
        """Makes the functions anew, as the model has been compiled anew."""
        if name == "train":
            self._finish_work()
            self._functions, self._sums = None, MetricSums(self._model)

    # What it does.

    def _prepared(self) -> Functions:
        functions = self._functions_of_model()
        if self._number is None:
            model = self._model
            refuse_impossible(model)
            optimizer = model.optimizer
            with self._strategy.scope():
                if not optimizer.built:
                    optimizer.build(model.trainable_variables)
                paths = self._strategy.paths_of(optimizer, model.trainable_variables)
                self._encoder.prepare(paths, [variable.shape for variable in model.trainable_variables])
            self._number = int(count_of_updates(optimizer).numpy())
        return functions

    def _functions_of_model(self) -> Functions:
        if self._functions is None:
            slots = None
            if isinstance(self._mode, Synchronous):
                slots = Slots(self._num_slots)
            self._functions = Functions(self._model, self._strategy, self._encoder, slots)
            self._number = None
        return self._functions

    def _send(self, functions: Functions) -> None:
        batches, self._pending = self._pending, []
        if isinstance(self._mode, Asynchronous):
            self._make_room()
            self._schedule(functions, batches, self._next_number(), 0, None)
        else:
            self._run_round(functions, batches)

    def _next_number(self) -> int:
        """Of the updates that are scheduled: as many as there were before it, also in a training that goes on."""
        if self._number is None:
            raise RuntimeError("nothing is prepared")
        self._number += 1
        return self._number - 1

    def _schedule(self, functions: Functions, batches: list[Any], number: int, slot: int, note: Any) -> None:
        step, at = tf.constant(number, tf.int64), tf.constant(slot, tf.int32)
        if isinstance(batches[0], WorkerIterator):
            args: tuple[Any, ...] = (batches[0].on_workers, len(batches), step, at)
            self._work.schedule(functions.train_on_iterator, args, note)
        else:
            self._work.schedule(functions.train_on_batches, (tuple(batches), step, at), note)

    def _run_round(self, functions: Functions, batches: list[Any]) -> None:
        mode = self._mode
        if not isinstance(mode, Synchronous):
            raise RuntimeError("not in rounds")
        # Who has not finished an earlier round takes no part: what it were given would only wait in the queue.
        self._work.wait(lambda: len(self._late) <= mode.backup_workers, self._take)
        able = self._workers - len(self._late)
        if isinstance(batches[0], WorkerIterator):
            parts = [batches] * able
        else:
            parts = [list(part) for part in zip(*(split(batch, able) for batch in batches), strict=False)]
        self._round += 1
        slots, self._free = self._free[: len(parts)], self._free[len(parts) :]
        self._done: dict[int, int] = {}  # samples, by slot
        first = self._next_number() * self._workers
        for number, (slot, part) in enumerate(zip(slots, parts, strict=True), first):
            self._schedule(functions, part, number, slot, (self._round, slot))
        needed = max(1, len(parts) - max(0, mode.backup_workers - len(self._late)))
        self._work.wait(lambda: len(self._done) >= needed, self._take)
        taken = dict(sorted(self._done.items()))
        self._late |= set(slots) - set(taken)
        weights = shares(list(taken.values()))
        functions.update(tf.constant(list(taken), tf.int32), tf.constant(weights, tf.float64))
        self._free = sorted([*self._free, *taken])  # so that sums are made in the same order after a restart
        self._round += 1

    def _make_room(self) -> None:
        limit = _QUEUED_PER_WORKER * self._workers
        if isinstance(self._mode, Asynchronous):
            limit = self._mode.most_at_work(self._workers) or limit
        self._work.wait(lambda: len(self._work) < limit, self._take)

    def _take(self, note: Any, result: dict[str, Any]) -> None:
        counts = True
        facts = {name: int(value) for name, value in result.get("facts", {}).items()}
        if note is not None:
            number, slot = note
            counts = number == self._round
            if counts:
                self._done[slot] = facts["samples"]
            else:
                self._late.discard(slot)
                self._free.append(slot)
        if facts:
            self._strategy.tally.add(facts, counts=counts)
        if counts:
            self._sums.add(result["metrics"], result["logs"])

    def _finish_work(self) -> None:
        self._work.wait(lambda: not len(self._work), self._take)

    def _results(self) -> dict[str, Any]:
        for note, result in self._work.finished():
            self._take(note, result)
        if not self._sums.results() and len(self._work):
            at_work = len(self._work)
            self._work.wait(lambda: len(self._work) < at_work, self._take)
        return self._sums.results()


def _concatenated(*parts: Any) -> Any:
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(parts))
    return tf.concat(parts, 0)
