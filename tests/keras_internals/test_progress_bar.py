"""The progress bar: shown by the chief alone, with the bytes sent, which no other callback sees."""

import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from stock_strategy import stock_mirrored

from tfdist.callbacks import CommunicationReport, GradientAccumulation
from tfdist.keras_internals.keras_callbacks import BytesPerStep, CommunicationProgressBar
from tfdist.private_symbols import has_reached
from tfdist.strategies import MirroredStrategy

pytestmark = pytest.mark.usefixtures("cpus")

INPUTS = np.random.default_rng(0).normal(size=(48, 64)).astype("float32")
TARGETS = INPUTS[:, :48].copy()
# Of (64 x 48 + 48) values of 4 bytes. Keras before 3.12 shows plain numbers only.
SENT, HALF, KILOBYTE = (
    ("sent: 12.5 kB/step", "sent: 6.2 kB/step", "sent: 1.0 kB/step")
    if has_reached("keras", "3.12")
    else ("sent_bytes_per_step: 12480.0000", "sent_bytes_per_step: 6240.0000", "sent_bytes_per_step: 1000.0000")
)


@pytest.fixture(scope="module")
def model(cpus):
    """A model on two replicas that send 12,480 bytes per step."""
    return compiled(MirroredStrategy(cpus[:2]))


def compiled(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(48)])
        model.compile(keras.optimizers.SGD(0.1), loss="mse")
    return model


def lines(capsys):
    """Returns the lines shown, without colours; each version of a rewritten line counts as a line."""
    text = re.sub(r"\x1b\[\d+m", "", capsys.readouterr().out)
    return [line.strip("\b ") for line in re.split("[\r\n]", text) if line.strip("\b ")]


def fit(model, *callbacks, **arguments):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Training ended after")
        return model.fit(INPUTS, TARGETS, batch_size=12, callbacks=list(callbacks), **arguments).history


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0 B/step"), (999.6, "1000 B/step"), (1000, "1.0 kB/step"), (40e6, "40.0 MB/step"), (1.25e9, "1.2 GB/step")],
)
def test_sizes_are_formatted_in_their_largest_unit(number, shown):
    assert f"{BytesPerStep(number) / 1:.4f}" == f"{BytesPerStep(2 * number) / 2:.4e}" == shown


def test_moving_bar_and_its_last_line_show_what_was_sent(model, capsys):
    seen, losses = [], []

    def see(_, logs):
        seen.append(set(logs))
        losses.append(logs["loss"])

    watch = keras.callbacks.LambdaCallback(on_train_batch_end=see, on_epoch_end=see)
    history = fit(model, watch, epochs=2, validation_data=(INPUTS, TARGETS))
    shown = lines(capsys)
    finished = [line for line in shown if line.startswith("4/4") and "val_loss" in line]
    assert len(finished) == 2
    # Keras before 3.12 shows the mean of what it has shown in the epoch.
    final = history["loss"] if has_reached("keras", "3.12") else [np.mean(losses[:5]), np.mean(losses[5:])]
    assert all(f" - loss: {loss:.4f}" in line for line, loss in zip(finished, final, strict=True))
    assert all(line.count(f" - {SENT}") == 1 for line in finished)
    assert set(history) == {"loss", "val_loss"}, "no callback sees it"
    assert seen == ([{"loss"}] * 4 + [{"loss", "val_loss"}]) * 2


def test_one_line_an_epoch(model, capsys):
    fit(model, epochs=2, verbose=2)
    assert [line.partition(" - ")[2][-len(SENT) :] for line in lines(capsys) if "loss" in line] == [SENT, SENT]


def test_a_size_is_that_of_the_steps_of_its_epoch(cpus, capsys):
    fit(compiled(MirroredStrategy(cpus[:2])), GradientAccumulation({0: 1, 1: 2}), epochs=2, verbose=2)
    sizes = [line.rpartition(" - ")[2] for line in lines(capsys) if " - sent" in line]
    assert sizes == [SENT, HALF], "two steps make an update in the second epoch"


def test_the_bar_of_a_resumed_epoch_counts_the_steps_that_it_makes(capsys):
    sent = iter([1000, 1000, 3000, 3000])
    bar = CommunicationProgressBar(lambda: next(sent))
    bar.set_params({"verbose": 2, "epochs": 1, "steps": 9})
    bar.on_epoch_begin(0)
    logs = {"loss": 1.0}
    for batch in (7, 8):
        bar.on_train_batch_begin(batch)
        bar.on_train_batch_end(batch, logs)
    bar.on_epoch_end(0, logs)
    assert logs == {"loss": 1.0}, "the logs of later callbacks"
    assert lines(capsys)[-1].endswith(f" - loss: 1.0000 - {KILOBYTE}")


def test_epoch_without_steps_shows_no_bytes(capsys):
    bar = CommunicationProgressBar(lambda: 5)
    bar.set_params({"verbose": 2, "epochs": 1, "steps": 4})
    bar.on_epoch_begin(0)
    bar.on_epoch_end(0, {"loss": 1.0})
    assert lines(capsys)[-1].endswith(" - loss: 1.0000")


def test_bar_of_the_user_is_unchanged(model, capsys):
    fit(model, keras.callbacks.ProgbarLogger(), verbose=2)
    [line] = lines(capsys)
    assert "loss" in line and "sent" not in line


@pytest.mark.parametrize("verbose", ["auto", 1, 2], ids=str)
def test_only_the_chief_shows_a_bar(model, capsys, monkeypatch, verbose):
    monkeypatch.setattr(type(model.distribute_strategy), "rank", 1)
    fit(model, verbose=verbose)
    model.evaluate(INPUTS, TARGETS, verbose=verbose)
    model.predict(INPUTS, verbose=verbose)
    assert lines(capsys) == []
    assert model.history.params["verbose"] == verbose
    bar = keras.callbacks.ProgbarLogger()
    fit(model, bar, verbose=2)
    assert len(lines(capsys)) == 1, "unless the user passes a bar"


def test_chief_shows_evaluation_and_prediction(model, capsys):
    model.evaluate(INPUTS, TARGETS, batch_size=24)
    model.predict(INPUTS, batch_size=24)
    shown = lines(capsys)
    assert sum(line.startswith("2/2") for line in shown) >= 2 and not any("sent" in line for line in shown)


@pytest.mark.parametrize(
    "make",
    [
        tf.distribute.get_strategy,
        lambda: stock_mirrored(["CPU:0", "CPU:1"]),
        lambda: MirroredStrategy(["CPU:0"]),
    ],
    ids=["none", "stock", "one replica"],
)
def test_bar_is_unchanged_if_bytes_are_not_counted(model, capsys, make):
    fit(compiled(make()), verbose=2)
    [line] = lines(capsys)
    assert re.fullmatch(r"4/4 - \d+s - \d+m?s/step - loss: \d\.\d{4}", line)


def test_bar_and_report_together(model, capsys):
    history = fit(model, CommunicationReport(print_table=False), verbose=2)
    assert lines(capsys)[-1].endswith(f" - {SENT}")
    assert history["wire_bytes"] == [12480.0]
