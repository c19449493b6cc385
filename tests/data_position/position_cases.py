"""Data of every kind for `fit`: functions that take the strategy and return arguments of `fit`."""

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
    "dataset in order": lambda strategy: {"x": dataset().batch(BATCH)},
    "dataset reshuffled": lambda strategy: {"x": dataset().shuffle(50, seed=3).batch(BATCH).prefetch(2)},
    "dataset with the global seed": lambda strategy: {"x": dataset().shuffle(9).batch(BATCH).shuffle(3)},
    "dataset shuffled once": lambda strategy: {
        "x": dataset().shuffle(50, seed=3, reshuffle_each_iteration=False).batch(BATCH)
    },
    "dataset repeated over epochs": lambda strategy: {
        "x": dataset().shuffle(50, seed=3).repeat().batch(BATCH),
        "steps_per_epoch": 4,
    },
    "dataset with uneven batches repeated": lambda strategy: {
        "x": dataset().shuffle(50, seed=3).batch(BATCH).repeat(),
        "steps_per_epoch": 5,
    },
    "dataset over epochs": lambda strategy: {
        "x": dataset().shuffle(50, seed=3).batch(BATCH),
        "steps_per_epoch": 4,
    },
    "dataset of unknown length": lambda strategy: {
        "x": dataset().shuffle(50, seed=3).filter(lambda number: number != 2).batch(BATCH)
    },
    "dataset of unknown length over epochs": lambda strategy: {
        "x": dataset().shuffle(50, seed=3).filter(lambda number: number != 2).repeat().batch(BATCH),
        "steps_per_epoch": 4,
    },
    "dataset, four steps an execution": lambda strategy: {
        "x": dataset().shuffle(50, seed=3).batch(BATCH),
        "steps_per_execution": 4,
    },
    "dataset of unknown length, two steps an execution": lambda strategy: {
        "x": dataset().shuffle(50, seed=3).filter(lambda number: number != 2).batch(BATCH),
        "steps_per_execution": 2,
    },
    "dataset with validation": lambda strategy: {
        "x": dataset().shuffle(50, seed=3).batch(BATCH),
        "validation_data": dataset().shuffle(50, seed=3).batch(6),
    },
    "dataset split after a shuffle": lambda strategy: split(dataset().shuffle(50, seed=3)),
    "dataset validated by itself": lambda strategy: {
        "x": (data := dataset().shuffle(50, seed=3).batch(6)),
        "validation_data": data,
    },
    "dataset with noise in a map": lambda strategy: {
        "x": dataset().map(lambda number: number + 100 * tf.random.uniform([], 0, 9, tf.int64, seed=5)).batch(BATCH)
    },
    "distributed dataset": of_strategy,
    "datasets of a function": of_function,
    "PyDataset": lambda strategy: {"x": Numbers(), "shuffle": True},
    "PyDataset in order": lambda strategy: {"x": Numbers()},
    "PyDataset with its own order": lambda strategy: {"x": Numbers(own_order=True)},
    "PyDataset with threads": lambda strategy: {"x": Numbers(workers=2), "shuffle": True},
    "PyDataset over epochs": lambda strategy: {"x": Numbers(), "shuffle": True, "steps_per_epoch": 4},
    "PyDataset without an end": lambda strategy: {"x": Numbers(endless=True), "steps_per_epoch": 4},
    "dataset repeated in every epoch": lambda strategy: {"x": dataset().shuffle(50, seed=3).repeat(2).batch(BATCH)},
    "dataset shuffled and kept": lambda strategy: {"x": dataset().shuffle(50, seed=3).cache().batch(BATCH)},
    "dataset of whole batches kept and read ahead": lambda strategy: {
        "x": dataset().take(20).shuffle(50, seed=3).cache().batch(BATCH).prefetch(2)
    },
    "PyDataset without an end, with threads": lambda strategy: {
        "x": Numbers(endless=True, workers=2),
        "steps_per_epoch": 4,
    },
}
