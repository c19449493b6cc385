"""Keras' progress bar of a training that resumes in the middle of an epoch."""

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
    """By the name of the epoch: the steps that the bar showed, as `done/all`, and its last values."""
    text = re.sub(r"\x1b\[\d+m", "", text).replace("\b", "")
    epochs = re.split(r"^Epoch (\d+/\d+)\n", text, flags=re.MULTILINE)
    found = {}
    for name, lines in zip(epochs[1::2], epochs[2::2], strict=True):
        steps = re.findall(r"(?:^|\r) *(\d+/\d+) ", lines, flags=re.MULTILINE)
        values = re.findall(r"- (loss|mae): (\S+)", re.split(r"[\r\n]", lines.strip())[-1])
        found[name] = steps, values
    return found


@pytest.mark.parametrize(
    ("verbose", "replicas"), [(1, 2), *(pytest.param(verbose, 1, marks=pytest.mark.long) for verbose in (1, 2))]
)
def test_it_shows_the_remaining_steps(tmp_path, capsys, monkeypatch, cpus, verbose, replicas):
    # By default the bar skips values that follow the last one quickly.
    unhurried = functools.partialmethod(keras.utils.Progbar.__init__, interval=-1)
    monkeypatch.setattr(keras.utils.Progbar, "__init__", unhurried)

    def run(folder, *callbacks):
        fit(tmp_path / folder, verbose, MirroredStrategy(cpus[:replicas]), *callbacks)

    run("undisturbed")
    undisturbed = shown(capsys.readouterr().out)
    all_steps = [f"{step}/{STEPS}" for step in range(1, STEPS + 1)]
    last = all_steps[-1:]  # again at the end of the epoch; verbose=2 shows only this one
    steps = [*all_steps, *last] if verbose == 1 else last
    assert [of for of, _ in undisturbed.values()] == [steps] * EPOCHS

    with pytest.raises(Interrupted):
        run("disturbed", Interrupt("on_train_batch_end", STEPS + 6))  # the last save is after the fourth
    capsys.readouterr()
    run("disturbed")
    resumed = shown(capsys.readouterr().out)
    assert list(resumed) == ["2/3", "3/3"]
    left, values = resumed["2/3"]
    assert left == (steps[4:] if verbose == 1 else last)
    assert values == undisturbed["2/3"][1] and {name for name, _ in values} == {"loss", "mae"}
    assert resumed["3/3"] == undisturbed["3/3"]
