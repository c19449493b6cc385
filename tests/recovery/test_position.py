"""A training that goes on from a position sees the samples that the undisturbed one has still to see, in its order.

Every case trains once undisturbed, keeping its position at each step, and then from some of these positions with data
made anew. `data_runs` says what a run tells.
"""

import itertools
import json

import numpy as np
import pytest
import tensorflow as tf
from data_runs import BATCH, EPOCHS, Start, dataset, train
from position_cases import CASES
from stock_strategy import stock_mirrored

from tfdist.keras_internals.input_pipeline import without_first
from tfdist.strategies import MirroredStrategy


@pytest.fixture(scope="module")
def strategies(cpus):
    return {
        "none": tf.distribute.get_strategy(),
        "stock": stock_mirrored(cpus[:2]),
        "tfdist": MirroredStrategy(cpus[:2]),
    }


@pytest.fixture(autouse=True)
def _quiet(recwarn):
    """Keras warns of `shuffle=True` and of data that ends; what is tested here is in `pytest.warns`."""
    yield


ON_DEVICES = {
    "tfdist": [
        "arrays",
        "arrays, two steps an execution",
        "data set reshuffled",
        "data set with the global seed",
        "data set with uneven batches repeated",
        "data set of unknown length over epochs",
        "data set of unknown length, two steps an execution",
        "data set repeated in every epoch",
        "data set shuffled and kept",
        "data set with validation",
        "data sets of a function",
        "PyDataset",
        "PyDataset with its own order",
        "PyDataset over epochs",
    ],
    "stock": [
        "arrays",
        "data set reshuffled",
        "data set of unknown length",
        "data set repeated in every epoch",
        "data set validated by itself",
        "distributed data set",
        "PyDataset with its own order",
        "PyDataset with threads",
    ],
}
RUNS = [
    *((case, "none") for case in CASES),
    *((case, name) for name, cases in ON_DEVICES.items() for case in cases),
]


def starts(run, name):
    """Positions of interest, each with the number of executions before it; fewer on devices."""
    first = sum(epoch == 0 for epoch, _, _ in run.steps)
    numbers = {first, first + 1} if name != "none" else {1, first // 2, first, first + 1, len(run.steps)}
    return [(number, run.positions[number]) for number in sorted(numbers)] + run.ends[:1]


@pytest.mark.parametrize(("case", "name"), RUNS)
def test_goes_on_with_the_samples_that_are_left(case, name, strategies):
    make, strategy = CASES[case], strategies[name]
    epochs = EPOCHS if name == "none" else EPOCHS - 1
    whole = train(make, strategy, epochs=epochs)
    assert len(whole.steps) >= epochs * 2 and len(whole.logs) == epochs
    for number, start in starts(whole, name):
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


def test_skipping_reads_but_does_not_hand_out_and_works_behind_the_sharing_out(strategies):
    for strategy in strategies.values():
        data = strategy.experimental_distribute_dataset(dataset().batch(BATCH).repeat())  # 4, …, 4, 2, 4, …

        def ids(data, strategy=strategy):
            batches = itertools.islice(iter(data), 9)
            return [[np.ravel(part).tolist() for part in strategy.experimental_local_results(b)] for b in batches]

        assert ids(without_first(data, 7))[:2] == ids(data)[7:]
    assert without_first(object(), 1) is None
