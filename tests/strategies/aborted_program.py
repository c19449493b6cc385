"""A process in which replicas sum tensors of different shapes; prints what each later use of a strategy raises."""

import json

import keras
import numpy as np
import tensorflow as tf

from tfdist.strategies import MirroredStrategy, MultiWorkerMirroredStrategy


def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def main() -> None:
    physical = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(physical, [tf.config.LogicalDeviceConfiguration()] * 2)
    devices = ["CPU:0", "CPU:1"]
    strategy = MirroredStrategy(devices)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", loss="mse")
    inputs, targets = np.ones([8, 4], "float32"), np.ones([8, 1], "float32")
    model.fit(inputs, targets, verbose=0)
    rows = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(context.replica_id_in_sync_group + 1)
    )

    def replica_step(count):
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([count]))

    dataset = tf.data.Dataset.range(8).batch(4)
    errors = {"cause": error_of(lambda: tf.function(lambda: strategy.run(replica_step, args=(rows,)))())}
    uses = {
        "fit": lambda: model.fit(inputs, targets, verbose=0),
        "evaluate": lambda: model.evaluate(inputs, targets, verbose=0),
        "predict": lambda: model.predict(inputs, verbose=0),
        "run": lambda: strategy.run(lambda: 1),
        "distribute_dataset": lambda: strategy.experimental_distribute_dataset(dataset),
        "distribute_datasets_from_function": lambda: strategy.distribute_datasets_from_function(lambda _: dataset),
        "new strategy": lambda: MirroredStrategy(devices),
        "new strategy of workers": MultiWorkerMirroredStrategy,
    }
    print(json.dumps({**errors, **{name: error_of(use) for name, use in uses.items()}}))


if __name__ == "__main__":
    main()
