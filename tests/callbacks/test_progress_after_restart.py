"""Keras' progress bar of a training that goes on in the middle of an epoch."""

import functools
import re

import keras
import numpy as np
import pytest
from interruptions import Interrupt, Interrupted

from tfdist.callbacks import FailureRecovery
from tfdist.strategies import MirroredStrategy

pytestmark = pytest.mark.usefixtures("cpus")
EPOCHS, STEPS = 3, 12
INPUTS = np.random.default_rng(0).normal(size=(STEPS * 2, 3)).astype("float32")


def fit(folder, verbose, strategy, *callbacks):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    recovery = FailureRecovery(folder, every_steps=4)
    data = {"x": INPUTS, "y": INPUTS[:, :1], "batch_size": 2}
    model.fit(**data, epochs=EPOCHS, verbose=verbose, callbacks=[recovery, *callbacks])


def shown(text):
    """By the epoch's name: the steps that the bar has shown, as `done/all`, and the values it has ended with."""
    text = re.sub(r"\x1b\[\d+m", "", text).replace("\b", "")
    epochs = re.split(r"^Epoch (\d+/\d+)\n", text, flags=re.MULTILINE)
    found = {}
    for name, lines in zip(epochs[1::2], epochs[2::2], strict=True):
        steps = re.findall(r"(?:^|\r) *(\d+/\d+) ", lines, flags=re.MULTILINE)
        values = re.findall(r"- (loss|mae): (\S+)", re.split(r"[\r\n]", lines.strip())[-1])
        found[name] = steps, values
    return found


@pytest.mark.parametrize(("verbose", "replicas"), [(1, 1), (1, 2), (2, 1)])
def test_it_shows_the_steps_that_are_left(tmp_path, capsys, monkeypatch, cpus, verbose, replicas):
    # The bar leaves out what comes soon after the last it has shown.
    unhurried = functools.partialmethod(keras.utils.Progbar.__init__, interval=-1)
    monkeypatch.setattr(keras.utils.Progbar, "__init__", unhurried)

    def run(folder, *callbacks):
        fit(tmp_path / folder, verbose, MirroredStrategy(cpus[:replicas]), *callbacks)

    run("undisturbed")
    undisturbed = shown(capsys.readouterr().out)
    all_steps = [f"{step}/{STEPS}" for step in range(1, STEPS + 1)]
    last = all_steps[-1:]  # once more at the end of the epoch, which alone is shown with verbose=2
    steps = [*all_steps, *last] if verbose == 1 else last
    assert [of for of, _ in undisturbed.values()] == [steps] * EPOCHS

    with pytest.raises(Interrupted):
        run("disturbed", Interrupt("on_train_batch_end", STEPS + 6))  # the last save is after the fourth
    capsys.readouterr()
    run("disturbed")
    went_on = shown(capsys.readouterr().out)
    assert list(went_on) == ["2/3", "3/3"]
    left, values = went_on["2/3"]
    assert left == (steps[4:] if verbose == 1 else last)
    assert values == undisturbed["2/3"][1] and {name for name, _ in values} == {"loss", "mae"}
    assert went_on["3/3"] == undisturbed["3/3"]
