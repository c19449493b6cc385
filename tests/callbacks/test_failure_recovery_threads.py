"""FailureRecovery where `fit` is not in the main thread, as in workers of Ray Train: requests and notices."""

import itertools
import sys
import threading
import types
import warnings

import keras
import pytest
from small_training import INPUTS, TARGETS, assert_same, fit, small_model

from tfdist.callbacks import FailureRecovery
from tfdist.checkpoint import CheckpointStore
from tfdist.recovery import preemption

pytestmark = pytest.mark.usefixtures("cpus")


def in_thread(function):
    """Calls `function` in another thread; returns its result or exception, and the warnings."""
    ended = []

    def call():
        try:
            ended.append(function())
        except BaseException as error:
            ended.append(error)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(120)
    return ended[0], [str(warning.message) for warning in seen if "FailureRecovery" in str(warning.message)]


class OnStep(keras.callbacks.Callback):
    """Calls a function after a step, counted from 1."""

    is_stateless = True

    def __init__(self, step, function):
        super().__init__()
        self._steps, self._function = itertools.count(1 - step), function

    def on_train_batch_end(self, batch, logs=None):
        if next(self._steps) == 0:
            self._function()


def test_a_request_from_another_thread_saves_and_ends_the_training(tmp_path):
    expected = fit(tmp_path / "undisturbed")
    recovery = FailureRecovery(tmp_path / "disturbed", every_epochs=100)

    def request():
        asking = threading.Thread(target=recovery.request_exit)
        asking.start()
        asking.join()

    def train():
        how = {"batch_size": 4, "epochs": 2, "verbose": 0, "callbacks": [recovery, OnStep(3, request)]}
        return small_model().fit(INPUTS, TARGETS, **how)

    ended, said = in_thread(train)
    assert isinstance(ended, SystemExit) and ended.code == 75
    assert len(said) == 1 and "`fit` does not run in the main thread" in said[0]
    assert "lambda *_: recovery.request_exit()" in said[0] and "Expected" in said[0]
    assert CheckpointStore(tmp_path / "disturbed").newest()[0].metadata["step"] == 3
    ended, said = in_thread(lambda: fit(tmp_path / "disturbed", every_epochs=100, handle_signals=False))
    assert_same(expected, ended)
    assert said == []


def test_a_notice_of_ray_train_saves_and_training_continues(tmp_path, monkeypatch):
    """Ray Train restarts what still trains when the node is lost; a function that returns has finished."""
    expected = fit(tmp_path / "undisturbed")
    notice = types.SimpleNamespace(preempted_node_ids=["a"], preempted_ranks=[0], deadline_ms=None)
    answers = itertools.chain([None], itertools.repeat(notice))
    ray_train = types.SimpleNamespace(
        get_context=lambda: types.SimpleNamespace(get_world_size=lambda: 1), get_preemption_info=lambda: next(answers)
    )
    monkeypatch.setitem(sys.modules, "ray.train", ray_train)
    monkeypatch.setattr(preemption, "_SECONDS_BETWEEN_QUESTIONS", 1e-6)
    newest = []
    look = OnStep(5, lambda: newest.append(CheckpointStore(tmp_path / "noticed").newest()[0].metadata["step"]))
    result, said = in_thread(lambda: fit(tmp_path / "noticed", look, every_epochs=100, background=False))
    assert_same(expected, result)
    assert newest == [2] and said == [], "notices take the place of signals"
