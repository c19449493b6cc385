"""If the program's learning rate has changed, FailureRecovery uses the checkpoint's and warns."""

import warnings

import keras
import pytest
from interruptions import Interrupt, Interrupted
from small_training import STEPS, fit, small_model

from tfdist.checkpoint import CheckpointStore

pytestmark = pytest.mark.usefixtures("cpus")


def interrupt(directory, model):
    with pytest.raises(Interrupted):
        fit(directory, Interrupt("on_train_batch_end", STEPS), model=model, every_steps=2)


def resumed(directory, model, *callbacks):
    """Returns the final rate and the warnings about it."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(directory, *callbacks, model=model, every_steps=2)
    warned = [str(warning.message) for warning in seen if "learning rate" in str(warning.message)]
    return float(model.optimizer.learning_rate), warned


def test_the_same_rate_causes_no_warning(tmp_path):
    interrupt(tmp_path, small_model())
    assert resumed(tmp_path, small_model()) == (pytest.approx(0.1), [])


@pytest.mark.parametrize("wraps", [False, True])
def test_another_rate_is_ignored_with_a_warning(tmp_path, wraps):
    def model(rate):
        made = small_model(rate=rate)
        if wraps:
            made.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(rate)), "categorical_crossentropy")
        return made

    interrupt(tmp_path, model(0.1))
    rate, (warned,) = resumed(tmp_path, model(0.001))
    assert rate == pytest.approx(0.1)
    assert warned.startswith(
        "The learning rate of this program is ignored: training resumes with that of the checkpoint. Received: 0.001"
    )
    assert "started with 0.1" in warned and "resumes with 0.1" in warned and "LearningRateScheduler" in warned


@pytest.mark.parametrize("same_model", [True, False], ids=["as in a notebook", "in a new process"])
def test_a_rate_set_by_a_callback_causes_no_warning(tmp_path, same_model):
    def lower(batch, logs):
        model.optimizer.learning_rate = 0.05

    model, lowers = small_model(), keras.callbacks.LambdaCallback(on_train_batch_end=lower)
    with pytest.raises(Interrupted):
        fit(tmp_path, lowers, Interrupt("on_train_batch_end", STEPS), model=model, every_steps=2)
    model = model if same_model else small_model()
    assert resumed(tmp_path, model, lowers) == (pytest.approx(0.05), [])


def test_rates_of_every_step_in_a_notebook(tmp_path):
    """The interrupted `fit` leaves the rate of a later step than the saved one."""

    def interrupted(model, step):
        def decay(batch, logs):
            model.optimizer.learning_rate = 0.1 / (1 + int(model.optimizer.iterations))

        decays = keras.callbacks.LambdaCallback(on_train_batch_end=decay)
        with warnings.catch_warnings(record=True) as seen, pytest.raises(Interrupted):
            warnings.simplefilter("always")
            fit(tmp_path, decays, Interrupt("on_train_batch_end", step), model=model, every_steps=2)
        return [str(warning.message) for warning in seen if "learning rate" in str(warning.message)]

    model = small_model()
    assert interrupted(model, 5) == []
    assert interrupted(model, 5) == [], "in the same process"
    assert interrupted(small_model(), 3) == [], "in a new one, after that"
    model.compile(keras.optimizers.SGD(0.7), "categorical_crossentropy")
    (warned,) = interrupted(model, 1)
    assert "Received: 0.7, where the run that saved the checkpoint started with 0.1" in warned


def test_a_scheduler_sets_the_rate_from_the_next_epoch_on(tmp_path):
    interrupt(tmp_path, small_model())
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: 0.001)
    assert resumed(tmp_path, small_model(rate=0.001), scheduler) == (pytest.approx(0.001), [])


def test_a_schedule_is_the_programs(tmp_path):
    schedules = keras.optimizers.schedules
    interrupt(tmp_path, small_model(rate=schedules.CosineDecay(0.1, 10)))
    rate, warned = resumed(tmp_path, small_model(rate=schedules.CosineDecay(0.001, 10**9)))
    assert rate == pytest.approx(0.001) and warned == []


def test_a_checkpoint_without_the_initial_rate(tmp_path, monkeypatch):
    save = CheckpointStore.save

    def save_as_before(self, *arguments, metadata, **keywords):
        del metadata["learning_rates"], metadata["progress"]["requested_epochs"]
        return save(self, *arguments, metadata=metadata, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "save", save_as_before)
        interrupt(tmp_path, small_model())
    assert resumed(tmp_path, small_model(rate=0.001)) == (pytest.approx(0.1), [])
