"""Custom loops: interrupted anywhere and started again, they end with the same bits; what is refused."""

import signal
from pathlib import Path

import gan_loop
import keras
import numpy as np
import pytest
import tensorflow as tf
from child_environment import run_python
from gan_loop import EPOCHS, STEPS, differences
from launched_runs import launch
from optional_packages import require

from tfdist.checkpoint import CheckpointError, CheckpointStore
from tfdist.cluster import MEMORY_VARIABLE
from tfdist.keras_internals.seed_generators import forget_global_seed_generator
from tfdist.recovery import LoopRecovery
from tfdist.recovery.resume import choose_checkpoint
from tfdist.strategies import LocalSGD, MirroredStrategy, ModelParallelStrategy, MultiWorkerMirroredStrategy, Pipeline

pytestmark = pytest.mark.usefixtures("cpus")
SCRIPT = Path(gan_loop.__file__)
SEARCH = SCRIPT.with_name("tuner_search.py")


class Interrupted(Exception):
    pass


def interrupt_at(step):
    def in_step(number):
        if number == step:
            raise Interrupted

    return in_step


def loop(directory, **options):
    return LoopRecovery(directory, **{"state": {"a": tf.Variable(0)}, "verbose": False, **options})


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.long)])
def test_killed_gan_ends_with_the_same_bits(tmp_path, count):
    done = run_python(str(SCRIPT), str(tmp_path), "kills", str(count))
    assert f"{count} kills" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("kind", ["one device", "mirrored"])
def test_interrupted_gan_ends_with_the_same_bits(tmp_path, cpus, kind):
    def train(name, **options):
        strategy = MirroredStrategy(cpus[:2], compression="powersgd:2") if kind == "mirrored" else None
        units = 512 if kind == "mirrored" else 8
        return gan_loop.train(tmp_path / name, strategy=strategy, epochs=2, units=units, every_steps=3, **options)

    expected, whole = train("whole")
    assert not whole.restored and whole.saves == 5
    again, finished = train("whole")
    assert (differences(expected, again), finished.restored, finished.step, finished.saves) == ([], True, 2 * STEPS, 0)
    for step, resumed in ((7, 6), (6, 6)):  # in an epoch, and in its first step: the reset of the metric counts once
        with pytest.raises(Interrupted):
            train(f"at {step}", in_step=interrupt_at(step))
        steps = []
        found, recovery = train(f"at {step}", in_step=steps.append)
        assert (differences(expected, found), recovery.restored, steps[0]) == ([], True, resumed)


@pytest.mark.long
@pytest.mark.multi_process
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", ["compressed", "sharded"])
def test_workers_that_are_killed_and_preempted_end_with_the_same_bits(tmp_path, options):
    run = launch(
        tmp_path, SCRIPT, "worker", options, options=["--workers", "2", "--max-restarts", "3"]
    ).assert_complete()
    assert run.output.count("failed first: killed by SIGKILL") == 2
    assert "worker 0 was preempted: it saved and exited (exit code 75)" in run.output
    assert "checkpoint saved at step 15 of fit 2" in run.output, (
        "a signal in step 13, from 0, takes effect after the next"
    )
    for rank in range(2):
        assert (tmp_path / f"ended-{rank}").read_text() == f"True {EPOCHS * STEPS} []"


class Loader:
    """As torch's StatefulDataLoader: its state is that of the pass in use."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        while self.next < 4:
            self.next += 1
            yield self.next
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def drawn():
    """A generator that draws an order when a pass begins."""
    yield from np.random.permutation(4).tolist()


class Drawn:
    def __iter__(self):
        return drawn()


def test_the_newest_state_is_in_memory(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(MEMORY_VARIABLE, str(tmp_path / "memory"))
    total = tf.Variable(0.0)

    def train(stop=None):
        total.assign(0.0)
        options = {"state": {"total": total}, "memory_every_steps": 2, "every_steps": 5, "verbose": True}
        with loop(tmp_path / "disk", background=False, **options) as recovery:
            for step, number in recovery.steps(range(8)):
                total.assign_add(number)
                if step == stop:
                    raise Interrupted
        return float(total)

    for stop, resumed in ((4, "4, from memory"), (6, "5\n")):  # saves after 4 steps to memory, after 5 to the disk
        with pytest.raises(Interrupted):
            train(stop)
        if stop == 6:
            next((tmp_path / "memory").rglob("shared.safetensors")).write_bytes(b"damaged")
        capsys.readouterr()
        with pytest.raises(Interrupted):
            train(int(resumed[0]))
        assert f"resuming in epoch 1, after step {resumed}" in capsys.readouterr().out
    assert train() == sum(range(8))
    assert not list((tmp_path / "memory").iterdir()), "the loop is saved"


def test_a_loop_resumes_from_an_object_store():
    require("fsspec")
    total = tf.Variable(0)

    def train(stop=None):
        total.assign(0)
        with loop("memory://bucket/loop", state={"total": total}, every_steps=1, background=False) as recovery:
            for step, number in recovery.steps(range(5)):
                total.assign_add(number)
                if step == stop:
                    raise Interrupted
        return recovery.restored, int(total)

    with pytest.raises(Interrupted):
        train(3)
    assert train() == (True, 10)


@pytest.mark.parametrize("data", [Loader, lambda: [5, 6, 7], lambda: range(4), Drawn])
def test_data_without_tensorflow(tmp_path, data):
    def train(name, stop=None):
        np.random.seed(3)
        seen, given = [], data()
        with loop(tmp_path / name, every_steps=1, replay_data=data is Drawn) as recovery:
            for _ in recovery.epochs(2):
                for step, batch in recovery.steps(given):
                    seen.append((step, batch, np.random.random()))
                    if step == stop:
                        raise Interrupted
        return seen

    expected = train("whole")
    stop = len(expected) * 3 // 4  # within the second epoch
    with pytest.raises(Interrupted):
        train("other", stop)
    assert train("other") == expected[stop:]


def test_python_in_a_pipeline_of_two_datasets(tmp_path):
    """Functions of the data hold a generator; an epoch has two passes."""

    def train(name, stop=None):
        generator = np.random.default_rng(5)
        source = tf.data.Dataset.from_generator(
            lambda: iter(generator.permutation(3)), output_signature=tf.TensorSpec([], tf.int64)
        )
        other, seen = tf.data.Dataset.range(3).shuffle(3, seed=1), []
        with loop(tmp_path / name, every_steps=1) as recovery:
            for _ in recovery.epochs(2):
                for data, limit in ((other, 2), (source, None)):
                    for step, batch in recovery.steps(data, limit):
                        seen.append((step, int(batch)))
                        if step == stop:
                            raise Interrupted
        return seen

    expected = train("whole")
    assert len(expected) == 10
    for stop in (3, 6):  # within the second pass, and the first of the next epoch
        with pytest.raises(Interrupted):
            train(f"at {stop}", stop)
        assert train(f"at {stop}") == expected[stop:]


def compiled():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    return model


def train_on_batches(directory, rate=None, stop=None, *, resets=True):
    """A loop by `train_on_batch` over batches that it draws itself."""
    keras.utils.set_random_seed(1)
    forget_global_seed_generator()
    model, logs = compiled(), []
    if rate is not None:
        model.optimizer.learning_rate = rate
    if not resets:
        model.reset_metrics = lambda: None  # metrics of all batches, though the first step creates them
    with loop(directory, model=model, every_steps=2, state=None) as recovery:
        for step, _ in recovery.steps(range(6)):
            if step == stop:
                raise Interrupted
            batch = np.random.normal(size=[2, 3])
            logs.append(model.train_on_batch(batch, batch[:, :1]))
    return logs


@pytest.mark.parametrize("resets", [True, False])
def test_train_on_batch(tmp_path, resets):
    expected = train_on_batches(tmp_path / "whole", resets=resets)
    with pytest.raises(Interrupted):
        train_on_batches(tmp_path / "other", stop=5, resets=resets)
    assert train_on_batches(tmp_path / "other", resets=resets) == expected[4:]


@pytest.mark.long
def test_a_search_of_kerastuner_that_is_killed_ends_with_the_same_scores(tmp_path):
    require("keras_tuner")

    def search(name, killed_after=0):
        exit_code = -signal.SIGKILL if killed_after else 0
        done = run_python(str(SEARCH), str(tmp_path / name), str(killed_after), exit_code=exit_code)
        return [line for line in done.stdout.splitlines() if line.startswith(("scores", "steps"))]

    scores, _ = search("whole")
    for killed_after in (10, 2):  # in trial 1, of three of six steps each
        search("killed", killed_after)
    assert search("killed") == [scores, f"steps {[[], [4, 5], list(range(6))]}"]


def test_a_shuffle_that_two_loops_share_is_warned_of(tmp_path, recwarn):
    shuffled = tf.data.Dataset.range(4).shuffle(4, seed=1)
    first, second, other = shuffled.batch(2), shuffled.batch(2), tf.data.Dataset.range(4).batch(2)
    for name, data in (("one", first), ("same, again", second), ("other", other)):
        recwarn.clear()
        with loop(tmp_path / name, every_steps=9) as recovery:
            for _ in recovery.epochs(2):
                assert len(list(recovery.steps(data))) == 2
        said = [
            str(warning.message) for warning in recwarn if "Two loops draw from one shuffle" in str(warning.message)
        ]
        assert len(said) == (name == "same, again")


def test_save_and_break(tmp_path):
    def train(every_steps=1000, stop=None):
        with loop(tmp_path, every_steps=every_steps, background=False) as recovery:
            for epoch in recovery.epochs(3):
                for step, _ in recovery.steps(range(9)):
                    assert (recovery.step, recovery.epoch) == (step, epoch)
                    if step == 1:
                        recovery.save()
                    if step == stop:
                        raise Interrupted
                    if step % 3 == 2:
                        break
                recovery.save()
        return recovery

    with pytest.raises(Interrupted):
        train(stop=4)
    first = CheckpointStore(tmp_path).newest()[0].metadata
    assert (first["step"], first["epoch"]) == (3, 1), "`save` after the pass saves at the end of the epoch"
    recovery = train()
    assert (recovery.restored, recovery.step, recovery.epoch) == (True, 9, 3)
    with pytest.raises(CheckpointError, match="Received: those of a custom loop"):
        choose_checkpoint(CheckpointStore(tmp_path))


def test_a_finished_loop_without_epochs_has_the_values_of_its_end(tmp_path):
    def train():
        total = keras.metrics.Sum()
        with loop(tmp_path, state={"total": total}, every_steps=2) as recovery:
            total.reset_state()
            for step, _ in recovery.steps(range(3)):
                total.update_state(step + 1)
        return float(total.result()), recovery.saves

    assert (train(), train()) == ((6.0, 2), (6.0, 0))


def test_other_state_is_named(tmp_path):
    with loop(tmp_path) as recovery:
        list(recovery.steps(tf.data.Dataset.range(1)))
    for state, message in (
        ({"b": tf.Variable(0)}, r"first difference is the variable 'state/state/b/value'"),
        ({"a": tf.Variable(0), "log": Loader()}, r"here only: \['state/log'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            loop(tmp_path, state=state).__enter__()
    with loop(tmp_path) as recovery, pytest.raises(ValueError, match="in its element 0. Received: float32"):
        list(recovery.steps(tf.data.Dataset.range(1).map(float)))


def test_a_loop_without_epochs_and_interval_is_warned_of(tmp_path):
    with loop(tmp_path) as recovery, pytest.warns(UserWarning, match="saves this loop at its end only"):
        list(recovery.steps(range(1)))


def test_a_rate_that_has_changed_is_warned_of(tmp_path):
    train_on_batches(tmp_path, 0.5)
    with pytest.warns(UserWarning, match=r"Received: 0.25.*To change the rate, assign it in the loop"):
        train_on_batches(tmp_path, 0.25)


def test_refused(tmp_path, cpus):
    recovery = loop(tmp_path)
    with pytest.raises(RuntimeError, match="outside of it"):
        recovery.save()
    with recovery:
        with pytest.raises(ValueError, match="has no position"):
            list(recovery.steps(iter([1])))
        with pytest.raises(RuntimeError, match="within another pass"):
            for _ in recovery.steps(range(2)):
                list(recovery.steps(range(2)))
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    optimizer, elastic = keras.optimizers.SGD(), MirroredStrategy(cpus[:1])
    elastic.may_lose_workers = True
    optimizer.build([keras.Variable(1.0, name="unknown")])
    for options, message in (
        ({"state": {"a": 1}}, r"Received: 1 \(state/a\)"),
        ({"model": unbuilt}, "is not built"),
        ({"optimizer": optimizer}, "updates 'unknown'"),
        (
            {"strategy": ModelParallelStrategy(cpus[:2], pipeline=Pipeline(stages=2))},
            "whose stages only steps",
        ),
        ({"strategy": MultiWorkerMirroredStrategy(mode=LocalSGD(sync_every=2))}, "only `fit` counts"),
        ({"strategy": elastic}, "Train by an `ElasticLoop`"),
    ):
        with pytest.raises(ValueError, match=message), loop(tmp_path, **options) as recovery:
            list(recovery.steps(range(1)))
