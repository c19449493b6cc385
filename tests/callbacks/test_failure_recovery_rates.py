"""FailureRecovery where the program's learning rate was changed: the checkpoint's is used, and that is said."""

import warnings

import keras
import pytest
from interruptions import Interrupt, Interrupted
from small_training import STEPS, fit, small_model

from tfdist.checkpoint import CheckpointStore

pytestmark = pytest.mark.usefixtures("cpus")


def begun(directory, model):
    with pytest.raises(Interrupted):
        fit(directory, Interrupt("on_train_batch_end", STEPS), model=model, every_steps=2)


def gone_on(directory, model, *callbacks):
    """The rate at the end, and what was said of it."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(directory, *callbacks, model=model, every_steps=2)
    told = [str(warning.message) for warning in seen if "learning rate" in str(warning.message)]
    return float(model.optimizer.learning_rate), told


def test_the_same_rate_is_nothing_to_speak_of(tmp_path):
    begun(tmp_path, small_model())
    assert gone_on(tmp_path, small_model()) == (pytest.approx(0.1), [])


@pytest.mark.parametrize("wraps", [False, True])
def test_another_rate_is_not_used_and_that_is_said(tmp_path, wraps):
    def model(rate):
        made = small_model(rate=rate)
        if wraps:
            made.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(rate)), "categorical_crossentropy")
        return made

    begun(tmp_path, model(0.1))
    rate, (told,) = gone_on(tmp_path, model(0.001))
    assert rate == pytest.approx(0.1)
    assert told.startswith("The learning rate of this program is not used: the checkpoint's is. Received: 0.001, where")
    assert "began with 0.1" in told and "goes on with 0.1" in told and "LearningRateScheduler" in told


@pytest.mark.parametrize("same_model", [True, False], ids=["as in a notebook", "in a new process"])
def test_what_a_callback_has_changed_is_not_the_programs(tmp_path, same_model):
    def lower(batch, logs):
        model.optimizer.learning_rate = 0.05

    model, lowers = small_model(), keras.callbacks.LambdaCallback(on_train_batch_end=lower)
    with pytest.raises(Interrupted):
        fit(tmp_path, lowers, Interrupt("on_train_batch_end", STEPS), model=model, every_steps=2)
    model = model if same_model else small_model()
    assert gone_on(tmp_path, model, lowers) == (pytest.approx(0.05), [])


def test_rates_of_every_step_in_a_notebook(tmp_path):
    """The interrupted `fit` leaves the rate of a later step than the one that was saved."""

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
    (told,) = interrupted(model, 1)
    assert "Received: 0.7, where the run that saved it began with 0.1" in told


def test_a_scheduler_sets_the_rate_from_the_next_epoch_on(tmp_path):
    begun(tmp_path, small_model())
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: 0.001)
    assert gone_on(tmp_path, small_model(rate=0.001), scheduler) == (pytest.approx(0.001), [])


def test_a_schedule_is_the_programs(tmp_path):
    schedules = keras.optimizers.schedules
    begun(tmp_path, small_model(rate=schedules.CosineDecay(0.1, 10)))
    rate, told = gone_on(tmp_path, small_model(rate=schedules.CosineDecay(0.001, 10**9)))
    assert rate == pytest.approx(0.001) and told == []


def test_a_checkpoint_that_does_not_know_its_rate(tmp_path, monkeypatch):
    save = CheckpointStore.save

    def save_as_before(self, *arguments, facts, **keywords):
        del facts["learning_rates"], facts["progress"]["asked_epochs"]
        return save(self, *arguments, facts=facts, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "save", save_as_before)
        begun(tmp_path, small_model())
    assert gone_on(tmp_path, small_model(rate=0.001)) == (pytest.approx(0.1), [])
