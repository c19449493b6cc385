"""A training that resumes at a position sees the remaining samples of the undisturbed training, in the same order.

Every case trains once undisturbed, recording its position at each step, and then from some of these positions with new
data. `data_runs.Run` describes what is compared.
"""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from data_runs import BATCH, assert_resumes, dataset
from position_cases import CASES
from stock_strategy import stock_mirrored

from tfdist.strategies import MirroredStrategy
from tfdist.tensorflow_internals.input_pipeline import skip_steps


@pytest.fixture(scope="module")
def strategies(cpus):
    return {
        "none": tf.distribute.get_strategy(),
        "stock": stock_mirrored(cpus[:2]),
        "tfdist": MirroredStrategy(cpus[:2]),
    }


@pytest.fixture(autouse=True)
def _quiet(recwarn):
    """Ignores Keras' warnings about `shuffle=True` and data that ends."""
    yield


# An iterator over two devices takes TensorFlow a quarter of a second, so few cases run under a strategy by default.
ON_DEVICES = {
    "tfdist": [
        "arrays",
        "dataset with uneven batches repeated",
        "dataset of unknown length, two steps an execution",
        "datasets of a function",
    ],
    "stock": ["dataset validated by itself", "distributed dataset"],
}
LONG = {
    "none": ["PyDataset with threads"],  # those without an end have threads, too
    "tfdist": [
        "arrays, two steps an execution",
        "dataset of unknown length over epochs",
        "dataset repeated in every epoch",
        "dataset reshuffled",
        "dataset with the global seed",
        "dataset shuffled and kept",
        "dataset with validation",
        "PyDataset",
        "PyDataset over epochs",
        "PyDataset with its own order",
    ],
    "stock": [
        "arrays",
        "dataset of unknown length",
        "dataset repeated in every epoch",
        "dataset reshuffled",
        "PyDataset with its own order",
        "PyDataset with threads",
    ],
}
RUNS = [
    *((case, "none") for case in CASES if case not in LONG["none"]),
    *((case, name) for name, cases in ON_DEVICES.items() for case in cases),
    *(pytest.param(case, name, marks=pytest.mark.long) for name, cases in LONG.items() for case in cases),
]


@pytest.mark.parametrize(("case", "name"), RUNS)
def test_resumed_training_sees_the_remaining_samples(case, name, strategies):
    assert_resumes(CASES[case], strategies[name], at_many_steps=name == "none")


def test_steps_are_skipped_after_sharding(strategies):
    for strategy in strategies.values():
        data = strategy.experimental_distribute_dataset(dataset().batch(BATCH).repeat())  # 4, …, 4, 2, 4, …

        def ids(data, strategy=strategy):
            batches = itertools.islice(iter(data), 9)
            return [[np.ravel(part).tolist() for part in strategy.experimental_local_results(b)] for b in batches]

        assert ids(skip_steps(data, 7))[:2] == ids(data)[7:]
    assert skip_steps(object(), 1) is None
