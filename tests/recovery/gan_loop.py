"""A GAN in a custom loop: two models and optimizers, metrics, and every kind of random generator.

`gan_loop.py FOLDER kills COUNT` kills the loop COUNT times by SIGKILL, at random moments. Under `tfdist run`,
`gan_loop.py FOLDER worker OPTIONS` is a worker, with "compressed" gradients or a "sharded" state of the optimizer; it
ends itself in the steps of FAULTS, one in each attempt.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfdist.keras_internals.seed_generators import forget_global_seed_generator
from tfdist.recovery import LoopRecovery

EPOCHS, STEPS = 5, 6
# By attempt: the rank that ends itself, the step, and the signal.
FAULTS = [(1, 4, signal.SIGKILL), (0, 9, signal.SIGKILL), (1, 13, signal.SIGTERM)]


class History:
    """State in Python, other on each worker."""

    def __init__(self, rank=0):
        self.rank, self.losses = rank, []

    def state_dict(self):
        return {"rank": self.rank, "losses": np.array(self.losses)}

    def load_state_dict(self, state):
        assert state["rank"] == self.rank
        self.losses = state["losses"].tolist()


def train(directory, *, strategy=None, in_step=lambda step: None, data=None, epochs=EPOCHS, units=8, **options):
    """Trains in a directory; calls `in_step` in the middle of each step. Returns the result and the LoopRecovery."""
    keras.utils.set_random_seed(1)
    forget_global_seed_generator()
    strategy = strategy or tf.distribute.get_strategy()
    rank = getattr(strategy, "rank", 0)
    with strategy.scope():
        layers = [[keras.layers.Dense(units), keras.layers.BatchNormalization(), keras.layers.Dense(3)], []]
        layers[1] = [keras.layers.Dropout(0.3, seed=5), keras.layers.Dense(units, "relu"), keras.layers.Dense(1)]
        maker, critic = (keras.Sequential([keras.Input((3,)), *ones]) for ones in layers)
        maker_optimizer, critic_optimizer = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.01, momentum=0.9)
        mean = keras.metrics.Mean()
        noise = tf.random.Generator.from_seed(3)
        best = tf.Variable(np.inf)
    history = History(rank)
    rows = tf.reshape(tf.range(72, dtype=tf.float32), [24, 3]) / 72
    data = data or strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(rows).shuffle(24, seed=3).batch(4)
    )

    def on_replica(batch, draws):
        made = maker(batch + noise.normal([3]) + draws, training=True)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(critic(made, training=True) - critic(batch, training=True)) / 4
        critic_optimizer.apply(tape.gradient(loss, critic.trainable_variables), critic.trainable_variables)
        with tf.GradientTape() as tape:
            loss = -tf.reduce_sum(critic(maker(batch + draws, training=True), training=True)) / 4
        maker_optimizer.apply(tape.gradient(loss, maker.trainable_variables), maker.trainable_variables)
        mean.update_state(loss)
        return loss

    run = tf.function(lambda batch, draws: strategy.reduce("SUM", strategy.run(on_replica, (batch, draws)), None))
    state = {"history": history, "more": [mean, {"noise": noise, "best": best}]}
    optimizers = {"maker": maker_optimizer, "critic": critic_optimizer}
    with LoopRecovery(
        directory, model=[maker, critic], optimizer=optimizers, state=state, verbose=False, **options
    ) as recovery:
        for _ in recovery.epochs(epochs):
            mean.reset_state()
            for step, batch in recovery.steps(data):
                draws = random.random() + np.random.random() + float(keras.random.uniform([]))
                loss = run(batch, tf.constant(draws, tf.float32))
                in_step(step)
                best.assign(tf.minimum(best, loss))
                history.losses.append(float(loss) + rank)
            history.losses.append(float(mean.result()))
    variables = [*maker.variables, *critic.variables, *maker_optimizer.variables, *critic_optimizer.variables]
    variables += [*mean.variables, noise.state, best]
    result = {f"variable {index}": np.asarray(one) for index, one in enumerate(variables)}
    drawn = np.array([random.random(), np.random.random(), float(keras.random.uniform([]))])
    return {**result, "losses": np.array(history.losses), "drawn": drawn}, recovery


def differences(one, other):
    """Returns the names of what differs in a bit."""
    return [name for name in one if one[name].tobytes() != other[name].tobytes()]


def _kill_at_random(folder, count):
    """TensorFlow is imported and not used yet, so processes can be forked."""
    choose, kills, run = random.Random(7), 0, 0
    _in_child(lambda: np.savez(folder / "expected.npz", **train(folder / "undisturbed", every_steps=2)[0]))
    while kills < count:
        run += 1
        directory, result = folder / f"run {run}", folder / f"result-{run}.npz"
        while not result.exists():
            after = choose.randrange(2, 9) if kills < count else 1000
            kills += _in_child(
                lambda told, directory=directory, result=result: np.savez(
                    result,
                    **train(directory, in_step=lambda step: os.write(told, b"."), every_steps=2)[0],
                ),
                kill_after=after,
                seconds=choose.uniform(0.0, 0.02),
            )
        expected, found = np.load(folder / "expected.npz"), np.load(result)
        assert differences(expected, found) == [], f"run {run}, after {kills} kills"
    print(f"{kills} kills, {run} trainings")


def _in_child(function, kill_after=None, seconds=0.0):
    """Runs a function in a fork; kills it some time after so many steps. Returns whether it was killed."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reads)
            function(*([] if kill_after is None else [writes]))
            code = 0
        finally:
            os._exit(code)
    os.close(writes)
    steps = 0
    while kill_after is not None and os.read(reads, 1):
        steps += 1
        if steps == kill_after:
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
    os.close(reads)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        return True
    assert status == 0, status
    return False


def _work(folder):
    from tfdist.strategies import MultiWorkerMirroredStrategy

    attempt = int(os.environ["TFDIST_ATTEMPT"])
    is_sharded = sys.argv[3] == "sharded"
    strategy = MultiWorkerMirroredStrategy(
        **({"shard_optimizer_state": True} if is_sharded else {"compression": "powersgd:2"})
    )

    def in_step(step):
        rank, at, number = FAULTS[attempt] if attempt < len(FAULTS) else (0, None, 0)
        if (strategy.rank, step) == (rank, at):
            os.kill(os.getpid(), number)

    options = {"strategy": strategy, "units": 512, "every_steps": 2}
    expected, _ = train(folder / "undisturbed", **options)
    found, recovery = train(folder / "disturbed", in_step=in_step, **options)
    differing = differences(expected, found)
    (folder / f"ended-{strategy.rank}").write_text(f"{recovery.restored} {recovery.step} {differing}")


if __name__ == "__main__":
    _kill_at_random(Path(sys.argv[1]), int(sys.argv[3])) if sys.argv[2] == "kills" else _work(Path(sys.argv[1]))
