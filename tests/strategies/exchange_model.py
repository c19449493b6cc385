"""Variables whose gradients are given numbers: what a strategy makes of them is the exchange, and nothing else."""

import keras
import numpy as np
import tensorflow as tf

from tfdist.compression import Policy, PowerSGD, Quantize, RandomK, Sign, TopK

# One method a variable, so that one trace has them all.
SHAPES = {
    "int8": (33, 65),
    "sign": (40, 80),
    "topk": (50, 60),
    "randomk": (40, 50),
    "powersgd": (65, 33),
    "bf16": (7, 300),
    "fp8": (30, 70),
    "bias": (33,),
}
STEPS = 3
LOW_RANK, RANDOM = PowerSGD(2), RandomK(0.05)


def policy(**arguments):
    rules = {
        "int8": Quantize(8),
        "sign": Sign(64),
        "topk": TopK(0.1, 64),
        "randomk": RANDOM,
        "powersgd": LOW_RANK,
        "bf16": "bf16",
        "fp8": "fp8",
        "bias": "int8",  # too small for it
    }
    return Policy(rules, **arguments)


def gradient(name, replica, step):
    random = np.random.default_rng([step, replica, list(SHAPES).index(name)])
    return (random.normal(size=SHAPES[name]) * (replica + 1)).astype("float32")


class Variables(keras.layers.Layer):
    def __init__(self):
        super().__init__(name="variables")
        for name, shape in SHAPES.items():
            setattr(self, name, self.add_weight(name=name, shape=shape, initializer="zeros"))


class Exchanges:
    """Sums given gradients under a strategy: SGD with a rate of 1 makes of zeros their negative sum."""

    def __init__(self, strategy, make_optimizer=lambda: keras.optimizers.SGD(1.0)):
        self.strategy = strategy
        with strategy.scope():
            self.layer = Variables()
            self.optimizer = make_optimizer()
            self.optimizer.build(self.layer.trainable_variables)

        @tf.function
        def step(gradients):
            def on_replica(gradients):
                self.optimizer.apply_gradients(zip(gradients, self.layer.trainable_variables, strict=True))

            strategy.run(on_replica, args=(gradients,))

        self._step = step

    def sums(self, make_gradient, step):
        """By variable: what each local replica has received; `make_gradient(name, replica, step)` says of what."""

        def own(context):
            replica = int(context.replica_id_in_sync_group)
            return [tf.constant(make_gradient(name, replica, step)) for name in SHAPES]

        for variable in self.layer.trainable_variables:
            variable.assign(tf.zeros_like(variable))
        self._step(self.strategy.experimental_distribute_values_from_function(own))
        return {
            name: [-local.numpy() for local in self.strategy.experimental_local_results(variable.value)]
            for name, variable in zip(SHAPES, self.layer.trainable_variables, strict=True)
        }

    def state(self, entry="residual"):
        """By the number of a replica and the name of a variable: an entry of its compressor's state."""
        return {
            int(number.removeprefix("replica_")): {
                path.partition("/")[2]: entries[entry].numpy()
                for path, entries in replica.entries.items()
                if entry in entries
            }
            for number, replica in self.strategy.compression_state.replicas.items()
        }
