"""Trainings that record the samples of every step, and their data."""

import collections
import json
import random
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.data_position.position import Position
from tfdist.data_position.resumable_iterator import ResumeCost, patch_epoch_iterator, start_at_epoch, training_iterator

SEED = 7
BATCH = 4
IDS = np.arange(1, 23)  # five batches and a half: the sixth is uneven
EPOCHS = 3


class Recorder(keras.Model):
    """Records the ids of the samples that each replica trains on, and logs their sum, which is not a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.seen: dict[int, list[int]] = {}

    def call(self, inputs: Any) -> Any:
        return tf.cast(inputs, tf.float32) * self.scale

    def train_step(self, data: Any) -> dict[str, Any]:
        ids = data[0] if isinstance(data, tuple) else data

        def record(replica: Any, ids: Any) -> None:
            self.seen.setdefault(int(replica), []).extend(int(number) for number in np.ravel(ids))

        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        tf.py_function(record, [replica, ids], [])
        return {"sum": tf.reduce_sum(tf.cast(ids, tf.float32))}

    def test_step(self, data: Any) -> dict[str, Any]:
        ids = data[0] if isinstance(data, tuple) else data
        return {"sum": tf.reduce_sum(tf.cast(ids, tf.float32))}


@dataclass
class Start:
    """Where a training resumes: the part of a checkpoint that concerns the data."""

    epoch: int
    position: dict[str, Any]
    random_state: Any = field(default_factory=random.getstate, repr=False)
    same_workers: bool = True


@dataclass
class Run:
    """What a training saw: per execution its epoch, last step and the ids on each replica; the logs of epochs; the
    positions before the first step, after each execution, and at the ends of epochs.
    """

    steps: list[tuple[int, int, dict[int, list[int]]]] = field(default_factory=list)
    logs: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    positions: list[Start] = field(default_factory=list)
    ends: list[tuple[int, Start]] = field(default_factory=list)  # with the number of executions before
    resume_cost: ResumeCost = field(default_factory=ResumeCost)

    @property
    def ids(self) -> list[list[int]]:
        """The ids of each execution, over all replicas."""
        return [sorted(number for ids in seen.values() for number in ids) for _, _, seen in self.steps]


class Watch(keras.callbacks.Callback):
    """Fills a `Run`, resumes at a position, and fails after a number of steps."""

    def __init__(self, run: Run, start: Start | None, fail_after: int | None, replay: bool) -> None:
        super().__init__()
        self.run, self.start, self.fail_after, self.replay = run, start, fail_after, replay

    def on_train_begin(self, logs: Any = None) -> None:
        self.iterator = training_iterator(self.model)
        self.model.seen.clear()
        if self.start is not None:
            position = Position.from_json(self.start.position)
            self.iterator.resume_at(position, replay=self.replay, same_workers=self.start.same_workers)
            start_at_epoch(self.model, self.start.epoch)
            random.setstate(self.start.random_state)
        self.run.positions.append(Start(0, self.iterator.position(0).to_json()))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.run.steps.append((self.epoch, batch, dict(self.model.seen)))
        self.model.seen.clear()
        self.run.positions.append(Start(self.epoch, self.iterator.position(batch + 1, logs).to_json()))
        self.run.resume_cost = self.iterator.resume_cost
        if len(self.run.steps) == self.fail_after:
            raise InterruptedError

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.run.logs.append((epoch, dict(logs)))
        self.run.ends.append((len(self.run.steps), Start(epoch + 1, self.iterator.position(0).to_json())))


_models: dict[tuple[int, int], Recorder] = {}


def model_for(strategy: Any, steps_per_execution: int = 1) -> Recorder:
    """Returns one model per strategy, because tracing its step takes most of the time."""
    if (id(strategy), steps_per_execution) not in _models:
        with strategy.scope():
            model = Recorder()
            model.compile(steps_per_execution=steps_per_execution)
        _models[id(strategy), steps_per_execution] = model
    return _models[id(strategy), steps_per_execution]


def train(
    case: Any,
    strategy: Any,
    start: Start | None = None,
    *,
    fail_after: int | None = None,
    seed: int | None = SEED,
    replay: bool = False,
    model: Any = None,
    callbacks: Any = (),
    **arguments: Any,
) -> Run:
    """Trains as a program that has just started: with new data and the program's seeds."""
    patch_epoch_iterator()
    keras.utils.set_random_seed(SEED if seed is None else seed)
    if seed is None:
        tf.random.set_seed(None)
        random.seed()
    if start is not None:
        random.seed(999)  # so nothing may depend on it before a callback has restored it
    run = Run()
    given = {**case(strategy), **arguments}
    model = model or model_for(strategy, given.pop("steps_per_execution", 1))
    given.pop("steps_per_execution", None)
    try:
        model.fit(
            **{"epochs": EPOCHS, "verbose": 0, "shuffle": False, **given},
            callbacks=[Watch(run, start, fail_after, replay), *callbacks],
        )
    except InterruptedError:
        pass
    return run


def assert_resumes(make: Any, strategy: Any, *, at_many_steps: bool) -> None:
    """Trains once undisturbed and then from some of its positions, in fewer epochs if not `at_many_steps`."""
    epochs = EPOCHS if at_many_steps else EPOCHS - 1
    whole = train(make, strategy, epochs=epochs)
    assert len(whole.steps) >= epochs * 2 and len(whole.logs) == epochs
    first = sum(epoch == 0 for epoch, _, _ in whole.steps)
    numbers = {1, first // 2, first, first + 1, len(whole.steps)} if at_many_steps else {first, first + 1}
    for number, start in [(number, whole.positions[number]) for number in sorted(numbers)] + whole.ends[:1]:
        position = json.loads(json.dumps(start.position))
        rest = train(make, strategy, Start(start.epoch, position, start.random_state), epochs=epochs)
        position.pop("order")
        where = f"after {number} executions, at {position}"
        assert rest.ids == whole.ids[number:], where
        assert rest.steps == whole.steps[number:], where
        assert rest.logs == whole.logs[start.epoch :], where
        positions = [[at.position for at in run.positions] for run in (rest, whole)]
        assert positions[0][1:] == positions[1][number + 1 :], where
        assert [end for _, end in rest.ends] == [end for _, end in whole.ends[start.epoch :]], where


class Numbers(keras.utils.PyDataset):
    """The ids in batches; with `own_order`, its hooks shuffle them."""

    def __init__(self, own_order: bool = False, endless: bool = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._own_order, self._endless = own_order, endless
        self._generator = np.random.default_rng(SEED)
        self._ids = IDS.copy()
        self.read: collections.deque[int] = collections.deque()

    @property
    def num_batches(self) -> int | None:
        return None if self._endless else -(-len(IDS) // BATCH)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        if self._endless:
            return (np.arange(BATCH) + index * BATCH + 1,)
        return (self._ids[index * BATCH : (index + 1) * BATCH].copy(),)

    def on_epoch_begin(self) -> None:
        if self._own_order:
            self._ids = self._ids[::-1]

    def on_epoch_end(self) -> None:
        if self._own_order:
            self._generator.shuffle(self._ids)


def dataset() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(IDS)


def endless() -> Any:
    for start in range(1, 1_000_000, BATCH):
        yield (np.arange(start, start + BATCH),)
