"""Data for `fit`, of every kind: functions of the strategy that return arguments of `fit`."""

import tensorflow as tf
from data_runs import BATCH, IDS, Numbers, dataset


def arrays(strategy, **arguments):
    return {"x": IDS, "batch_size": BATCH, "shuffle": True, **arguments}


def split(data):
    return {"x": data.skip(6).batch(BATCH), "validation_data": data.take(6).batch(2)}


def of_strategy(strategy):
    return {"x": strategy.experimental_distribute_dataset(dataset().shuffle(50, seed=3).batch(BATCH))}


def of_function(strategy):
    def make(context):
        return dataset().shuffle(50, seed=3).batch(context.get_per_replica_batch_size(BATCH))

    return {"x": strategy.distribute_datasets_from_function(make)}


CASES = {
    "arrays": arrays,
    "arrays in order": lambda strategy: arrays(strategy, shuffle=False),
    "arrays, batches shuffled within": lambda strategy: arrays(strategy, shuffle="batch"),
    "arrays over epochs": lambda strategy: arrays(strategy, steps_per_epoch=4),
    "arrays, two steps an execution": lambda strategy: arrays(strategy, steps_per_execution=2),
    "arrays with validation": lambda strategy: arrays(strategy, validation_data=(IDS,), validation_batch_size=6),
    "data set in order": lambda strategy: {"x": dataset().batch(BATCH)},
    "data set reshuffled": lambda strategy: {"x": dataset().shuffle(50, seed=3).batch(BATCH).prefetch(2)},
    "data set with the global seed": lambda strategy: {"x": dataset().shuffle(9).batch(BATCH).shuffle(3)},
    "data set shuffled once": lambda strategy: {
        "x": dataset().shuffle(50, seed=3, reshuffle_each_iteration=False).batch(BATCH)
    },
    "data set repeated over epochs": lambda strategy: {
        "x": dataset().shuffle(50, seed=3).repeat().batch(BATCH),
        "steps_per_epoch": 4,
    },
    "data set with uneven batches repeated": lambda strategy: {
        "x": dataset().shuffle(50, seed=3).batch(BATCH).repeat(),
        "steps_per_epoch": 5,
    },
    "data set over epochs": lambda strategy: {
        "x": dataset().shuffle(50, seed=3).batch(BATCH),
        "steps_per_epoch": 4,
    },
    "data set of unknown length": lambda strategy: {
        "x": dataset().shuffle(50, seed=3).filter(lambda number: number != 2).batch(BATCH)
    },
    "data set of unknown length over epochs": lambda strategy: {
        "x": dataset().shuffle(50, seed=3).filter(lambda number: number != 2).repeat().batch(BATCH),
        "steps_per_epoch": 4,
    },
    "data set, four steps an execution": lambda strategy: {
        "x": dataset().shuffle(50, seed=3).batch(BATCH),
        "steps_per_execution": 4,
    },
    "data set of unknown length, two steps an execution": lambda strategy: {
        "x": dataset().shuffle(50, seed=3).filter(lambda number: number != 2).batch(BATCH),
        "steps_per_execution": 2,
    },
    "data set with validation": lambda strategy: {
        "x": dataset().shuffle(50, seed=3).batch(BATCH),
        "validation_data": dataset().shuffle(50, seed=3).batch(6),
    },
    "data set split after a shuffle": lambda strategy: split(dataset().shuffle(50, seed=3)),
    "data set validated by itself": lambda strategy: {
        "x": (data := dataset().shuffle(50, seed=3).batch(6)),
        "validation_data": data,
    },
    "data set with noise in a map": lambda strategy: {
        "x": dataset().map(lambda number: number + 100 * tf.random.uniform([], 0, 9, tf.int64, seed=5)).batch(BATCH)
    },
    "distributed data set": of_strategy,
    "data sets of a function": of_function,
    "PyDataset": lambda strategy: {"x": Numbers(), "shuffle": True},
    "PyDataset in order": lambda strategy: {"x": Numbers()},
    "PyDataset with its own order": lambda strategy: {"x": Numbers(own_order=True)},
    "PyDataset with threads": lambda strategy: {"x": Numbers(workers=2), "shuffle": True},
    "PyDataset over epochs": lambda strategy: {"x": Numbers(), "shuffle": True, "steps_per_epoch": 4},
    "PyDataset without an end": lambda strategy: {"x": Numbers(endless=True), "steps_per_epoch": 4},
    "data set repeated in every epoch": lambda strategy: {"x": dataset().shuffle(50, seed=3).repeat(2).batch(BATCH)},
    "data set shuffled and kept": lambda strategy: {"x": dataset().shuffle(50, seed=3).cache().batch(BATCH)},
    "data set of whole batches kept and read ahead": lambda strategy: {
        "x": dataset().take(20).shuffle(50, seed=3).cache().batch(BATCH).prefetch(2)
    },
    "PyDataset without an end, with threads": lambda strategy: {
        "x": Numbers(endless=True, workers=2),
        "steps_per_epoch": 4,
    },
}
