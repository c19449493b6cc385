"""Cases of a `train_step` that reads what it has updated, and of what it logs, compared with one process."""

import functools
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from cluster_cases import FEATURES, INPUTS, LABELS, Outcome, case, compared

from tfdist.strategies import Asynchronous, ParameterServerStrategy, Synchronous

ops = keras.ops
Adam, SGD = keras.optimizers.Adam, keras.optimizers.SGD


class Critic(keras.layers.Layer):
    """Judges samples by their features and by a row of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = keras.layers.Embedding(3, 4)
        self.hidden, self.output_of = keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)

    def build(self, shape: Any) -> None:
        self.rows.build()
        self.hidden.build((None, FEATURES + 4))
        self.output_of.build((None, 8))

    def call(self, inputs: Any, labels: Any) -> Any:
        return self.output_of(self.hidden(ops.concatenate([inputs, self.rows(labels)], axis=1)))


class Adversarial(keras.Model):
    """Two updates of a critic, whose weights are clipped, one of a generator through it, and a moving average of that.

    The second critic's loss, the generator's loss, the average and a log read what an update or an assignment has
    changed; a metric of the first loss is computed with the weights from before.
    """

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(1)
        self.critic, self.generator, self.average = Critic(), keras.layers.Dense(FEATURES), keras.layers.Dense(FEATURES)
        self.critic.build((None, FEATURES))
        self.generator.build((None, FEATURES))
        self.average.build((None, FEATURES))
        self.average.set_weights(self.generator.get_weights())
        self.critic_loss = keras.metrics.Mean(name="critic_loss")

    def compile(self, optimizers: Any, **compiled: Any) -> None:
        super().compile(**compiled)
        self.critic_optimizer, self.generator_optimizer = optimizers

    @property
    def metrics(self) -> list[Any]:
        return [self.critic_loss]

    def call(self, inputs: Any) -> Any:
        return self.average(inputs)

    def train_step(self, data: Any) -> Any:
        inputs, labels = data
        noise = ops.roll(inputs, 1, axis=1)
        for _ in range(2):
            with tf.GradientTape() as tape:
                made = self.generator(noise)
                loss = ops.mean(self.critic(made, labels)) - ops.mean(ops.tanh(self.critic(inputs, labels)))
            variables = self.critic.trainable_variables
            self.critic_optimizer.apply(tape.gradient(loss, variables), variables)
            for variable in variables:
                variable.assign(ops.clip(variable, -0.3, 0.3))
            self.critic_loss.update_state(loss)
        with tf.GradientTape() as tape:
            generator_loss = -ops.mean(self.critic(self.generator(noise), labels))
        variables = self.generator.trainable_variables
        self.generator_optimizer.apply(tape.gradient(generator_loss, variables), variables)
        for average, variable in zip(self.average.trainable_variables, variables, strict=True):
            average.assign(0.9 * average + 0.1 * variable)
        norm = sum(ops.sum(variable**2) for variable in variables)
        return {"critic_loss": self.critic_loss.result(), "generator_loss": generator_loss, "norm": norm}


def adversarial(strategy: Any, batch_size: int = 40, **compiled: Any) -> Outcome:
    with strategy.scope():
        model = Adversarial()
        # One process squares the gradients of a row one by one, so the critic's optimizer squares none.
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.8)
        model.compile((SGD(schedule, momentum=0.5), Adam(0.01, clipnorm=0.5)), **compiled)
    history = model.fit(INPUTS[:160], LABELS[:160], batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    counts = [int(one.iterations.numpy()) for one in (model.critic_optimizer, model.generator_optimizer)]
    return {"weights": model.get_weights(), "logs": history.history, "counts": counts}


compared(
    "updates_that_depend_on_each_other",
    lambda: ParameterServerStrategy(mode=Synchronous(), gradient_accumulation_steps=2),
    functools.partial(adversarial, batch_size=20),
    adversarial,
)
compared("dependent_updates_one_at_a_time", lambda: ParameterServerStrategy(mode=Asynchronous(0)), adversarial)


class Counted(keras.metrics.Metric):
    """Returns its variable, an integer, and takes only the labels."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.samples = self.add_weight(shape=(), initializer="zeros", dtype="int64")

    def update_state(self, labels: Any) -> None:
        self.samples.assign(self.samples + ops.cast(ops.shape(labels)[0], "int64"))

    def result(self) -> Any:
        return self.samples


class TwoWays(keras.Model):
    """Two updates of the same variables from one tape, the second with gradients of the values before the first.

    It logs values of its own, one under the name of a metric, a sum, an integer, a vector, and nested results.
    """

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(1)
        self.hidden = keras.layers.Dense(8, "tanh", kernel_constraint=keras.constraints.MaxNorm(0.8))
        self.normalized, self.dense = keras.layers.BatchNormalization(scale=False, center=False), keras.layers.Dense(3)
        self.seen, self.counted = keras.metrics.Mean(name="seen"), Counted(name="counted")

    def build(self, shape: Any) -> None:
        self.hidden.build(shape)
        self.normalized.build((None, 8))
        self.dense.build((None, 8))

    def call(self, inputs: Any, training: bool = False) -> Any:
        # Its statistics would be those of a part: normalized by the moving ones.
        return self.dense(self.normalized(self.hidden(inputs), training=False))

    def _logs(self, loss: Any, labels: Any, predicted: Any) -> Any:
        self.seen.update_state(predicted[:, 0] ** 2)
        self.counted.update_state(labels)
        return {
            "seen": loss,
            "its_mean": self.seen.result(),
            "total": ops.sum(predicted**2),
            "own": ops.mean(ops.abs(predicted)) + 1.0,
            "vector": ops.sum(ops.mean(predicted, axis=0) * ops.arange(3.0)),
            "updates": self.optimizer.iterations,
            "counted": self.counted.result(),
            "compiled": self.compute_metrics(None, labels, predicted),
        }

    def train_step(self, data: Any) -> Any:
        inputs, labels = data[0], data[1]
        with tf.GradientTape(persistent=True) as tape:
            predicted = self(inputs, training=True)
            loss = self.compute_loss(None, labels, predicted)
            other = ops.mean(predicted**2)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.optimizer.apply(tape.gradient(other, variables), variables)
        # Reads what both updates have made, so that the losses are computed again with the values from before.
        return {**self._logs(loss, labels, predicted), "after": ops.mean(self(inputs))}

    def test_step(self, data: Any) -> Any:
        predicted = self(data[0])
        return self._logs(self.compute_loss(None, data[1], predicted), data[1], predicted)


class OneWay(TwoWays):
    """A usual step, with the same logs."""

    def train_step(self, data: Any) -> Any:
        inputs, labels = data[0], data[1]
        with tf.GradientTape() as tape:
            predicted = self(inputs, training=True)
            loss = self.compute_loss(None, labels, predicted)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return self._logs(loss, labels, predicted)


def _logged(model: Any, batch_size: int = 30, **compiled: Any) -> Any:
    def program(strategy: Any) -> Outcome:
        with strategy.scope():
            built = model()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            optimizer = keras.optimizers.LossScaleOptimizer(Adam(0.01), initial_scale=8.0, dynamic_growth_steps=5)
            built.compile(optimizer if model is TwoWays else Adam(0.01), loss, metrics=["accuracy"], **compiled)
        history = built.fit(
            INPUTS,
            LABELS,
            batch_size=batch_size,
            epochs=2,
            shuffle=False,
            verbose=0,
            validation_data=(INPUTS[:70], LABELS[:70]),
        )
        evaluated = built.evaluate(INPUTS[:50], LABELS[:50], return_dict=True, verbose=0)
        return {
            "weights": built.get_weights(),
            "logs": history.history,
            "evaluated": evaluated,
            "on_batch": built.train_on_batch(INPUTS[:20], LABELS[:20], return_dict=True),
        }

    return program


_two_ways = _logged(TwoWays)
_one_way = _logged(OneWay)
_synchronous = lambda **options: ParameterServerStrategy(mode=Synchronous(), **options)  # noqa: E731
compared("two_updates_of_one_tape", _synchronous, _two_ways)
compared("own_values_in_logs", _synchronous, _logged(OneWay, steps_per_execution=3), traced=True)
compared("own_values_of_pushes", lambda: ParameterServerStrategy(mode=Asynchronous(0)), _one_way)


class Failing(keras.Model):
    """Updates a kernel, and then computes with it, in a `tf.function` or in a loop."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.dense = kind, keras.layers.Dense(3)
        self.function = tf.function(lambda inputs: self.dense(inputs))

    def build(self, shape: Any) -> None:
        self.dense.build(shape)

    def call(self, inputs: Any) -> Any:
        if self.kind == "function":
            return self.function(inputs)
        if self.kind == "loop":
            start = (0, tf.zeros([tf.shape(inputs)[0], 3]))
            return tf.while_loop(lambda turn, _: turn < 1, lambda turn, _: (turn + 1, self.dense(inputs)), start)[1]
        return self.dense(inputs)

    def train_step(self, data: Any) -> Any:
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = ops.mean(self(data[0]) ** 2)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@case
def dependent_updates_that_cannot_be(_: Path) -> Outcome:
    messages = []
    rounds, pushes = ParameterServerStrategy(mode=Synchronous()), ParameterServerStrategy(gradient_accumulation_steps=2)
    of_workers = rounds.distribute_datasets_from_function(
        lambda _: tf.data.Dataset.from_tensors((INPUTS[:20], LABELS[:20])).repeat()
    )
    of_chief = tf.data.Dataset.from_tensor_slices((INPUTS[:40], LABELS[:40])).batch(20)
    for strategy, kind, data in (
        (rounds, "function", of_chief),
        (rounds, "loop", of_chief),
        (rounds, "plain", of_workers),
        (pushes, "plain", of_chief),
    ):
        with strategy.scope():
            model = Failing(kind)
            model.compile(SGD(0.1))
        try:
            model.fit(data, steps_per_epoch=2, verbose=0)
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return {"messages": messages}
