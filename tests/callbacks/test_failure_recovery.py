"""FailureRecovery in one process: after any interruption, the next `fit` ends as if nothing had happened."""

import gc
import signal
import warnings
import weakref

import keras
import numpy as np
import pytest
from interruptions import Interrupt, Interrupted, disturbed, names
from small_training import fit, small_model
from stock_strategy import stock_mirrored
from training import EPOCHS, STEPS, differences, train

from tfdist.callbacks import CommunicationReport, FailureRecovery
from tfdist.keras_internals.running_fit import running_fit
from tfdist.strategies import MirroredStrategy

pytestmark = pytest.mark.usefixtures("cpus")


def mirrored(**arguments):
    return lambda: MirroredStrategy(["CPU:0", "CPU:1"], **arguments)


TRAININGS = {
    "one process": {},
    "arrays, accumulated": {"kind": "arrays", "accumulation": 3},
    "unknown cardinality": {"kind": "unknown"},
    "PyDataset": {"kind": "PyDataset"},
    "PyDataset with threads": {"kind": "PyDataset with threads"},
    "two replicas": {"strategy": mirrored()},
    "two replicas, stock": {"strategy": lambda: stock_mirrored(["CPU:0", "CPU:1"])},
}
# Others do more: `test_every_moment` has one process, tests/any_strategy the stock strategies, tests/data_position the
# kinds of data.
LONG = (
    "one process",
    "unknown cardinality",
    "PyDataset",
    "PyDataset with threads",
    "two replicas",
    "two replicas, stock",
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The results of the trainings without interruption."""
    results = {}

    def result(name):
        if name not in results:
            results[name] = train(tmp_path_factory.mktemp("undisturbed"), every_epochs=100, **TRAININGS[name])
        return results[name]

    return result


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in TRAININGS])
def test_every_training_ends_as_if_nothing_had_happened(tmp_path, undisturbed, name):
    # In the last step of the first epoch, and in the validation of the second.
    interruptions = ("on_train_batch_end", STEPS), ("on_test_batch_end", 3)
    result = disturbed(tmp_path, *interruptions, every_steps=2, **TRAININGS[name])
    assert differences(undisturbed(name), result) == []


@pytest.mark.long  # by default tests/chaos kills compressed trainings
def test_a_compressed_training_with_a_report_of_communication(tmp_path):
    """The logs, the table of CommunicationReport, residuals and accumulators are those of an uninterrupted training."""

    def report(folder, *callbacks):
        reporting = CommunicationReport(print_table=False)
        strategy = mirrored(compression="powersgd:2")
        arguments = {"strategy": strategy, "accumulation": 2, "every_steps": 3, "epochs": 2}
        return train(folder, callbacks=[reporting, *callbacks], **arguments), reporting.table()

    expected, table = report(tmp_path / "undisturbed")
    with pytest.raises(Interrupted):
        report(tmp_path / "disturbed", Interrupt("on_train_batch_end", STEPS + 5))
    result, same_table = report(tmp_path / "disturbed")
    assert differences(expected, result) == []
    assert any("bytes" in name for name in result) and same_table == table


@pytest.mark.long  # by default tests/data_position/test_resumable_iterator.py resumes within two steps an execution
def test_two_steps_an_execution(tmp_path):
    expected = train(tmp_path / "undisturbed", steps_per_execution=2, every_epochs=100)
    # Of 7 steps, after 6 with the last save after 4, and within the next epoch.
    interruptions = ("on_train_batch_end", 3), ("on_train_batch_end", 4)
    result = disturbed(tmp_path / "disturbed", *interruptions, steps_per_execution=2, every_steps=3)
    assert differences(expected, result) == []


@pytest.mark.parametrize("is_drawn_again", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_generator_resumes_if_it_may_be_drawn_again(tmp_path, is_drawn_again):
    folder = tmp_path / "disturbed"
    with pytest.raises(Interrupted):
        train(folder, kind="generator", callbacks=[Interrupt("on_train_batch_end", STEPS + 3)], every_steps=2)
    for _ in range(2):  # the first leaves what the second finds
        with pytest.raises(RuntimeError, match=f"data is a generator.*Received: {STEPS + 1} batches.*replay_data=True"):
            train(folder, kind="generator", every_steps=2)
    if not is_drawn_again:  # by default tests/data_position/test_python_randomness.py draws again
        return
    expected = train(tmp_path / "undisturbed", kind="generator", every_epochs=100)
    # Within the second epoch, and on its last step.
    interruptions = ("on_train_batch_end", 2), ("on_train_batch_end", STEPS - 2)
    result = disturbed(folder, *interruptions, kind="generator", every_steps=1, replay_data=True)
    assert differences(expected, result) == []


def test_every_moment(tmp_path, undisturbed):
    """One interruption after another. Each run resumes from the last multiple of three steps."""
    result = disturbed(
        tmp_path,
        ("on_train_batch_end", 1),  # the first step
        ("on_train_batch_end", 5),  # in the first epoch
        ("on_train_batch_end", STEPS - 3),  # its last step, from step 3
        ("on_train_batch_end", STEPS + 1 - 6),  # the first step of the second epoch, from step 6
        ("on_test_batch_end", 3),  # the second validation, from step 6
        ("on_epoch_end", 1),  # the end of the second epoch, from step 12
        ("on_train_batch_end", STEPS * EPOCHS - 12),  # the last step, from step 12
        ("on_train_end", 1),  # the end of the training, from step 18
        every_steps=3,
    )
    assert differences(undisturbed("one process"), result) == []


@pytest.mark.parametrize(
    ("interruptions", "intervals"),
    [
        pytest.param(
            [("on_train_batch_end", STEPS), ("on_test_batch_end", 3)], {"every_steps": 1}, marks=pytest.mark.long
        ),
        ([("on_epoch_end", 2)], {}),
    ],
    ids=["every step", "every epoch"],
)
def test_other_intervals(tmp_path, undisturbed, interruptions, intervals):
    result = disturbed(tmp_path, *interruptions, **intervals)
    assert differences(undisturbed("one process"), result) == []


def test_a_signal_saves_and_ends_with_its_code(tmp_path, undisturbed):
    """In a step, and in the validation after the resumed epoch."""
    for number, moment in enumerate([("on_train_batch_end", 4), ("on_test_batch_end", 1)]):
        with pytest.raises(SystemExit) as ending:
            train(tmp_path, callbacks=[Interrupt(*moment, signal.SIGTERM)], every_epochs=100)
        assert ending.value.code == 75 and len(names(tmp_path)) == number + 1
    result = train(tmp_path, every_epochs=100)
    assert differences(undisturbed("one process"), result) == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_signal_after_the_last_step_changes_nothing(tmp_path, undisturbed):
    signalled = Interrupt("on_test_batch_end", 2 * EPOCHS, signal.SIGTERM)
    result = train(tmp_path, callbacks=[signalled], every_epochs=100)
    assert signalled.count == 0 and differences(undisturbed("one process"), result) == []
    assert differences(result, train(tmp_path, every_epochs=100)) == []


@pytest.mark.parametrize("handle", [True, False])
def test_signals_are_not_handled_if_disabled(tmp_path, monkeypatch, handle):
    installed = []
    monkeypatch.setattr(
        "tfdist.recovery.preemption.PreemptionHandler.install", lambda self: installed.append(self) or True
    )
    fit(tmp_path, handle_signals=handle, epochs=1)
    assert len(installed) == handle


def test_a_last_save_that_was_given_up_is_not_reported_as_saved(tmp_path, monkeypatch, capsys):
    """As in elastic training, within an accumulation of a lost worker."""
    recovery = FailureRecovery(tmp_path)
    small_model().fit(np.ones([4, 3]), np.ones([4, 3]), verbose=2, callbacks=[recovery])
    recovery.save_to_leave()
    recovery._progress = recovery._progress.after_batch(3)
    monkeypatch.setattr(recovery._store, "save", lambda *arguments, **options: None)
    recovery.save_to_leave()
    said = [line for line in capsys.readouterr().out.splitlines() if "preempted" in line]
    assert [line.partition(" after")[0] for line in said] == [
        "FailureRecovery: preempted: saved",
        "FailureRecovery: preempted: not saved",
    ]


def test_another_model_is_an_error_before_anything_changes(tmp_path):
    def compiled(units):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units)])
        model.compile("sgd", loss="mse")
        before = model.get_weights()
        inputs = np.ones([8, 3], "float32"), np.ones([8, units], "float32")
        return model, before, lambda: model.fit(*inputs, verbose=0, callbacks=[FailureRecovery(tmp_path)])

    compiled(1)[2]()
    model, before, again = compiled(2)
    with pytest.raises(ValueError, match="(?s)Received.*Expected"):
        again()
    assert all(np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True))


def test_other_draws_before_fit_by_another_seed_are_a_warning(tmp_path, monkeypatch):
    def train(seed, *, epochs, draws):
        model = small_model()
        monkeypatch.setenv("TFDIST_SEED", str(seed))
        np.random.seed(seed)  # as a worker begins
        np.random.random(draws)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            fit(tmp_path, model=model, epochs=epochs)
        return [str(each.message) for each in seen if "other random numbers before" in str(each.message)]

    assert train(1, epochs=1, draws=3) == []
    (warning,) = train(2, epochs=2, draws=3)
    assert "Received: seed 2 of this run. Expected: seed 1. Start it with `tfdist run --seed 1`" in warning
    assert train(2, epochs=3, draws=3) == train(3, epochs=4, draws=0) == []


def test_it_refers_to_no_fit_that_has_ended(tmp_path):
    """Otherwise the model and the copies of its variables would wait for the collector of cycles."""
    model, fits = small_model(), []
    look = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: fits.append(weakref.ref(running_fit(model))))
    gc.disable()
    try:
        fit(tmp_path, look, model=model, epochs=1)
    finally:
        gc.enable()
    assert len(fits) == 1 and fits[0]() is None
