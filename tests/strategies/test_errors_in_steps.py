"""What follows an error in a step: one process trains on, or says that it must end; workers say so."""

import json
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from child_environment import run_python
from launched_runs import launch_once

from tfdist.keras_internals.model_state import OptimizerState, components, model_variables
from tfdist.strategies import MirroredStrategy, MultiWorkerMirroredStrategy

_LIMIT_SECONDS = 600
# Equal numbers of values, too, would be gathered as rows of the other shape.
_MISMATCHES = [
    rf"worker 0: all-gather \d+ of {first} float32 values; worker 1: all-gather \d+ of {other} .*Shape mismatch"
    for first, other in (("1x2", "1x3"), ("3x1x2", "3x2x1"))
]
_HERE = Path(__file__).parent
STRATEGIES = {
    "mirrored": lambda cpus: MirroredStrategy(cpus[:2]),
    "one worker": lambda _: MultiWorkerMirroredStrategy(),
}

INPUTS = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
TARGETS = INPUTS.sum(axis=1, keepdims=True)


class CheckedInput(keras.layers.Layer):
    """Fails where its input is not finite."""

    def call(self, inputs):
        return tf.debugging.check_numerics(inputs, "bad input")


def compiled(strategy, **arguments):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), CheckedInput(), keras.layers.Dropout(0.2), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01, **arguments), loss="mse")
    return model


def batches(bad_row=None):
    inputs = INPUTS.copy()
    if bad_row is not None:
        inputs[bad_row] = np.nan
    return tf.data.Dataset.from_tensor_slices((inputs, TARGETS)).batch(8)


def unequal_variables(model, strategy):
    """The variables, equal on all replicas between two steps, that are not."""
    found = [found.variable for found in model_variables(model)] + OptimizerState(model.optimizer).variables
    return [
        variable.path
        for variable in found
        if any(not np.array_equal(components(strategy, variable)[0], other) for other in components(strategy, variable))
    ]


@pytest.mark.parametrize(("kind", "steps", "accumulated"), [("mirrored", (0, 0, 3, 3), 2), ("one worker", (2,), None)])
def test_training_continues_after_an_error_on_the_last_replica(cpus, kind, steps, accumulated):
    strategy = STRATEGIES[kind](cpus)
    model = compiled(strategy, gradient_accumulation_steps=accumulated)
    for step in steps:
        with pytest.raises(tf.errors.InvalidArgumentError, match="bad input"):
            model.fit(batches(8 * step + 7), verbose=0, shuffle=False)
        assert unequal_variables(model, strategy) == []
    done = int(model.optimizer.iterations.numpy())
    before = model.evaluate(batches(), verbose=0)
    model.fit(batches(), verbose=0, epochs=2)
    assert int(model.optimizer.iterations.numpy()) - done == 12 // (accumulated or 1)
    assert model.evaluate(batches(), verbose=0) < before
    assert unequal_variables(model, strategy) == []
    with pytest.raises(tf.errors.InvalidArgumentError, match="bad input"):
        model.evaluate(batches(7), verbose=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="bad input"):
        model.predict(batches(7), verbose=0)
    assert model.evaluate(batches(), verbose=0) < before
    assert np.isfinite(model.predict(batches(), verbose=0)).all()
    other = compiled(STRATEGIES[kind](cpus))
    assert np.isfinite(other.fit(batches(), verbose=0).history["loss"][0])


def test_replicas_are_equal_again_after_an_error_between_their_updates(cpus):
    strategy = MirroredStrategy(cpus[:2])
    model = compiled(strategy)
    model.fit(batches(), verbose=0)

    class Failing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            for variable in (model.trainable_variables[0], model.optimizer.iterations, model.optimizer.variables[2]):
                components(strategy, variable)[1].assign_add(tf.ones_like(components(strategy, variable)[1]))
            raise RuntimeError("as if only the second replica had been updated")

    with pytest.raises(RuntimeError, match="second replica"):
        model.fit(batches(), verbose=0, callbacks=[Failing()])
    assert unequal_variables(model, strategy) == []


def summed(strategy):
    """A step that sums numbers of replicas in a condition; it fails before if one is negative."""

    def replica_step(number):
        number = tf.debugging.check_numerics(number, "bad input")
        replica = tf.distribute.get_replica_context()
        return tf.cond(number > 0, lambda: replica.all_reduce("SUM", number), lambda: number)

    @tf.function
    def step(numbers):
        return strategy.run(replica_step, args=(numbers,))

    def call(*numbers):
        values = strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(numbers[context.replica_id_in_sync_group])
        )
        return [float(value) for value in strategy.experimental_local_results(step(values))]

    return call


def test_a_custom_loop_continues_after_an_error_of_its_first_step_or_later(cpus):
    call = summed(MirroredStrategy(cpus[:2]))
    for first in (1.0, 2.0, 3.0):
        for _ in range(2):
            with pytest.raises(tf.errors.InvalidArgumentError, match="bad input"):
                call(first, np.nan)
        assert call(first, 2.0) == [first + 2.0] * 2
        with pytest.raises(tf.errors.InvalidArgumentError, match="bad input"):
            call(np.nan, first)
        assert call(2.0, first) == [first + 2.0] * 2


def test_an_aborted_collective_is_reported_before_the_next_one():
    """The program observes its own errors, since no collective runs in its process any more."""
    ended = run_python(_HERE / "aborted_program.py", limit_seconds=_LIMIT_SECONDS)
    errors = json.loads(ended.stdout.splitlines()[-1])
    cause = errors.pop("cause")
    assert cause.startswith("InvalidArgumentError: ") and "Shape mismatch in the collective instance" in cause
    assert set(errors) == {
        "fit",
        "evaluate",
        "predict",
        "run",
        "distribute_dataset",
        "distribute_datasets_from_function",
        "new strategy",
        "new strategy of workers",
    }
    for error in errors.values():
        assert error.startswith("RuntimeError: A collective, or a step on this worker, has failed earlier")
        assert "Received: 'Collective ops is aborted by: Shape mismatch in the collective instance" in error
        assert "restart the notebook's kernel" in error and "tfdist run --max-restarts" in error


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """What each later use of a strategy raises, on each worker."""
    run = launch_once(tmp_path_factory, "failed steps", _HERE / "failing_worker.py", options=["--workers", "2"])
    run.assert_complete()
    return [run.json(f"errors-{rank}.json") for rank in range(2)]


@pytest.mark.multi_process
class TestOnWorkers:
    """Rank 1 fails in a step, catches the error, and ends after two more attempts; rank 0 loses it."""

    def test_new_strategies_train_after_workers_have_reduced_different_shapes(self, errors):
        """That they do is what all other tests of this class rely on: their strategy is the third one."""
        for error in errors:
            for mismatch, calls in zip(error["mismatches"], _MISMATCHES, strict=True):
                assert mismatch["gather"].startswith("InvalidArgumentError"), mismatch
                assert "The workers call different exchanges. Received: " in mismatch["gather"]
                assert re.search(calls, mismatch["gather"]), mismatch
                assert mismatch["run"].startswith("RuntimeError: A collective, or a step on this worker, has failed")
                assert "Create new strategies on all workers" in mismatch["run"]

    def test_each_worker_sees_its_own_error_first(self, errors):
        assert "bad input" in errors[1]["first"]
        assert errors[0]["first"].startswith("WorkerLostError: Worker 1 is lost. Received: its process has ended")

    @pytest.mark.parametrize("what", ["fit", "evaluate", "predict", "reduce", "gather", "new strategy"])
    @pytest.mark.parametrize(("rank", "cause"), [(0, "Worker 1 is lost. Received: "), (1, "bad input : ")])
    def test_everything_later_is_one_clear_error(self, errors, rank, cause, what):
        error = errors[rank][what]
        assert error.startswith("RuntimeError: A collective, or a step on this worker, has failed earlier"), error
        assert error.partition("Received: '")[2].startswith(cause)
