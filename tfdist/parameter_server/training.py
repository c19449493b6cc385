"""The chief's part of `fit`, `evaluate` and `predict`: gives batches to the workers, and takes what they return."""

import dataclasses
import time
from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals.scheduled_training import count_of_updates, metrics_result
from tfdist.parameter_server.encoding import Encoder
from tfdist.parameter_server.functions import Functions
from tfdist.parameter_server.lost_servers import Servers, names_lost_servers
from tfdist.parameter_server.metric_sums import MetricSums
from tfdist.parameter_server.modes import Asynchronous, Synchronous
from tfdist.parameter_server.own_divisors import OwnDivisors
from tfdist.parameter_server.packing import Packing
from tfdist.parameter_server.place import Place
from tfdist.parameter_server.refusals import refuse_impossible
from tfdist.parameter_server.rows import count, split, split_all
from tfdist.parameter_server.slots import Slots, shares
from tfdist.parameter_server.work import Work
from tfdist.parameter_server.worker_datasets import WorkerIterator

_QUEUED_PER_WORKER = 2


@dataclasses.dataclass(frozen=True)
class _Step:
    """What is scheduled: when, by `time.monotonic()`, and for which round and slot, if the mode has any."""

    at: float
    round: int = 0
    slot: int = 0


class Training:
    """Trains one model under a parameter server strategy."""

    def __init__(self, model: keras.Model) -> None:
        """To be made once a model."""
        self._model = model
        self._strategy = strategy = model.distribute_strategy
        self._mode, self._workers = strategy.mode, strategy.workers
        self.servers = Servers(strategy.server_addresses)
        self._work = Work(strategy.coordinator, self.servers.look)
        self._sums = MetricSums(model)
        self._packing = Packing()
        self._encoder = Encoder(strategy.policy, strategy.new_worker_variable)
        self._functions: Functions | None = None
        self._own_divisors = OwnDivisors(model, strategy)
        self._pending: list[Any] = []  # batches of the next push
        self._is_prepared = False
        self._number: int | None = None  # of the next update to be scheduled; `None`: the servers know
        spare = 2 if isinstance(self._mode, Synchronous) and self._mode.backup_workers else 1
        self._num_slots = spare * self._workers
        self._free = list(range(self._num_slots))
        self._round = 0
        self._late: set[int] = set()  # slots of parts that their round has left out

    # What Keras calls.

    @names_lost_servers
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
            self._finish_training()
        return self._results()

    @names_lost_servers
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
            self._work.schedule(functions.test, (batch,), self._sums.next_number())
        if not isinstance(iterator, tf.data.Iterator | WorkerIterator):
            self._finish_work()
        return self._results()

    @names_lost_servers
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

    @names_lost_servers
    def begin(self) -> None:
        """Begins to count the metrics anew."""
        self._finish_work()
        self._sums.reset()
        self._number = None

    @names_lost_servers
    def wait(self) -> None:
        """Waits until all that has been taken is trained on, and stores the metrics."""
        self._finish_training()
        self._sums.store()
        self._number = None  # so that the numbers go on after a save as after a restart

    @names_lost_servers
    def abandon(self) -> None:
        """Lets go of what a `fit` that an exception has ended had drawn, before other values are restored."""
        self._pending.clear()
        self._finish_work()
        self._number = None

    def forget(self, name: str) -> None:
        """Makes the functions anew, as the model has been compiled anew."""
        if name == "train":
            self._finish_work()
            self._functions, self._sums = None, MetricSums(self._model)
            self._own_divisors = OwnDivisors(self._model, self._strategy)

    # What it does.

    def _prepared(self) -> Functions:
        functions = self._functions_of_model()
        if not self._is_prepared:
            model = self._model
            refuse_impossible(model)
            optimizer = model.optimizer
            with self._strategy.scope():
                if not optimizer.built:
                    optimizer.build(model.trainable_variables)
                paths = self._strategy.paths_of(optimizer, model.trainable_variables)
                self._encoder.prepare(paths, [variable.shape for variable in model.trainable_variables])
            self._is_prepared = True
        return functions

    def _functions_of_model(self) -> Functions:
        if self._functions is None:
            slots = None
            if isinstance(self._mode, Synchronous):
                slots = Slots(self._num_slots)
            self._functions = Functions(self._model, self._strategy, self._encoder, slots, self._packing)
            self._is_prepared = False
        return self._functions

    def _send(self, functions: Functions) -> None:
        batches, self._pending = self._pending, []
        if isinstance(self._mode, Asynchronous):
            self._make_room()
            whole, divisors = self._whole(functions, batches, [batches])
            self._schedule(functions, batches, Place(self._next_number(), 0, whole, divisors), _Step(time.monotonic()))
        else:
            self._run_round(functions, batches)

    def _next_number(self) -> int:
        """How many updates there were before this one, also in a training that goes on elsewhere."""
        if self._number is None:
            self._number = int(count_of_updates(self._model.optimizer).numpy())
        self._number += 1
        return self._number - 1

    def _schedule(self, functions: Functions, batches: list[Any], place: Place, step: _Step) -> None:
        if isinstance(batches[0], WorkerIterator):
            args: tuple[Any, ...] = (batches[0].on_workers, len(batches), place.packed())
            self._work.schedule(functions.train_on_iterator, args, step)
        else:
            self._work.schedule(functions.train_on_batches, (tuple(batches), place.packed()), step)

    def _whole(self, functions: Functions, batches: list[Any], parts: list[list[Any]]) -> tuple[int, list[float]]:
        """What the parts of a push must know of all of it; see `Place`."""
        if isinstance(batches[0], WorkerIterator):
            return len(parts), []
        if len(parts) == len(batches) == 1:
            return count(batches[0]), []
        number = functions.own_divisors(parts[0])
        return sum(map(count, batches)), self._own_divisors.of(batches, number) if number else []

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
            parts = split_all(batches, able)
        whole, divisors = self._whole(functions, batches, parts)
        self._round += 1
        slots, self._free = self._free[: len(parts)], self._free[len(parts) :]
        self._done: dict[int, tuple[int, Any]] = {}  # samples and result, by slot
        first, began = self._next_number() * self._workers, time.monotonic()
        self._ends: list[tuple[float, int]] = []  # when which worker ended, in this order
        for number, (slot, part) in enumerate(zip(slots, parts, strict=True), first):
            self._schedule(functions, part, Place(number, slot, whole, divisors), _Step(began, self._round, slot))
        needed = max(1, len(parts) - max(0, mode.backup_workers - len(self._late)))
        self._work.wait(lambda: len(self._done) >= needed, self._take)
        if len(self._ends) > 1:
            (before_last, _), (last, worker) = self._ends[-2:]
            self._strategy.tally.add_held_up(worker, last - before_last)
        taken = dict(sorted(self._done.items()))
        self._late |= set(slots) - set(taken)
        for _, result in taken.values():  # in this order: rounding does not tell who was first
            self._sums.add(result["metrics"], result["logs"])
        weights = shares([samples for samples, _ in taken.values()])
        functions.update(tf.constant(list(taken), tf.int32), tf.constant(weights, tf.float64))
        self._free = sorted([*self._free, *taken])  # so that sums are made in the same order after a restart
        self._round += 1

    def _make_room(self) -> None:
        limit = _QUEUED_PER_WORKER * self._workers
        span: int | None = None
        if isinstance(self._mode, Asynchronous):
            limit = self._mode.most_at_work(self._workers) or limit
            span = self._mode.longest_span(self._workers)
        self._work.wait(lambda: len(self._work) < limit and (span is None or self._work.span < span), self._take)

    def _take(self, note: Any, packed: list[Any]) -> None:
        result = self._packing.unpack(packed)
        if not isinstance(note, _Step):  # of `evaluate`
            self._sums.add_in_order(note, result["metrics"], result["logs"])
            return
        facts = {name: int(value) for name, value in result["facts"].items()}
        counts = isinstance(self._mode, Asynchronous) or note.round == self._round
        self._strategy.tally.add(facts, counts=counts, scheduled_at=note.at)
        if isinstance(self._mode, Asynchronous):
            self._sums.add(result["metrics"], result["logs"])
        elif counts:
            self._done[note.slot] = facts["samples"], result
            self._ends.append((time.monotonic(), facts["worker"]))
        else:
            self._late.discard(note.slot)
            self._free.append(note.slot)

    def _finish_training(self) -> None:
        if self._pending and self._functions is not None:
            self._send(self._functions)
        self._finish_work()

    def _finish_work(self) -> None:
        self._work.wait(lambda: not len(self._work), self._take)
        self._free, self._late = list(range(self._num_slots)), set()  # also after a round that was broken off

    def _results(self) -> dict[str, Any]:
        for note, result in self._work.finished():
            self._take(note, result)
        self._work.wait(lambda: self._sums.has_results or not len(self._work), self._take)
        # Before the first push of an epoch Keras still wants the names.
        return self._sums.results() or metrics_result(self._model)


def _concatenated(*parts: Any) -> Any:
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(parts))
    return tf.concat(parts, 0)
