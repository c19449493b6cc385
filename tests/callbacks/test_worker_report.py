"""WorkerReport: numbers, table, slow workers, hints, errors; the statistics that it reads."""

import csv
import logging

import keras
import numpy as np
import pytest
from replaced_clocks import set_clock
from worker_training import Training, count

from tfdist.callbacks import WorkerReport, worker_report
from tfdist.parameter_server import push_statistics
from tfdist.parameter_server.modes import Asynchronous, Synchronous
from tfdist.parameter_server.push_statistics import StatsCollector

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.fixture
def clock(monkeypatch):
    return set_clock(monkeypatch, worker_report, push_statistics)


def test_logs_of_an_epoch_are_of_that_epoch(clock):
    training = Training(clock)
    training.do(count(7), count(9))  # before this training
    training.report.on_train_begin()
    training.epoch(0, count(10), count(20))
    logs = training.epoch(1, count(40, staleness=0.5, seconds=1.5), count(10, staleness=2.0), validation=60.0)
    assert list(logs) == [
        f"worker_{worker}_{name}"
        for worker in range(2)
        for name in (
            "steps",
            "samples_per_second",
            "seconds_at_work",
            "staleness",
            "max_staleness",
            "bytes_pushed",
            "bytes_pulled",
        )
    ]
    assert [logs[f"worker_0_{name}"] for name in ("steps", "samples_per_second", "seconds_at_work")] == [40, 160, 1.5]
    assert [logs[f"worker_1_{name}"] for name in ("steps", "samples_per_second", "seconds_at_work")] == [10, 40, 1]
    assert (logs["worker_0_staleness"], logs["worker_1_staleness"]) == (0.5, 2.0)
    assert (logs["worker_0_bytes_pushed"], logs["worker_0_bytes_pulled"]) == (4000, 12000)


def test_the_table_is_of_the_training(clock, capsys):
    training = Training(clock)
    training.do(count(7), count(9))
    training.report.on_train_begin()
    training.epoch(0, count(10, staleness=1.0), count(10))
    training.epoch(1, count(10), count(10, left_out=2, held_up_seconds=0.7), validation=60.0)
    assert capsys.readouterr().out == ""
    training.report.on_train_end()
    table = [
        "Workers (40 steps in 4.0 s):",
        "worker  steps  late  samples  samples/s  at work  staleness  max  pushed kB  pulled kB  held up s",
        "-------------------------------------------------------------------------------------------------",
        "0          20     0      160         40     50 %       0.50    0      2.000      6.000        0.0",
        "1          20     2      160         40     50 %       0.00    0      2.000      6.000        0.7",
        "-------------------------------------------------------------------------------------------------",
        "total      40     2      320         80     50 %       0.25    0      4.000     12.000        0.7",
    ]
    assert capsys.readouterr().out.splitlines() == table
    training.do(count(50), count(50))  # in a training after it
    assert training.report.table().splitlines() == table


def test_verbose_prints_a_table_per_epoch(clock, capsys):
    training = Training(clock, verbose=True, print_table=False)
    training.report.on_train_begin()
    for number in range(2):
        training.epoch(number, count(10), count(10 + number))
    training.report.on_train_end()
    titles = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Workers")]
    assert titles == ["Workers in epoch 1 (20 steps in 2.0 s):", "Workers in epoch 2 (21 steps in 2.0 s):"]


def test_a_slow_worker_is_named_when_it_becomes_slow(clock, caplog):
    training = Training(clock, workers=3)
    training.report.on_train_begin()
    fast, slow = count(10, seconds=1.0), count(10, seconds=2.1)
    for number, last in enumerate([count(10, seconds=1.9), slow, slow, fast, slow]):
        training.epoch(number, fast, count(10, seconds=1.1), last)
    assert [record.message for record in caplog.records] == [
        f"WorkerReport: worker 2 is slow: 38 samples per second at work in epoch {epoch}; the median of the others "
        "is 76."
        for epoch in (2, 5)
    ]
    assert {record.name for record in caplog.records} == {"tfdist"}


def test_two_workers_are_compared_with_each_other(clock, caplog):
    training = Training(clock)
    training.report.on_train_begin()
    training.epoch(0, count(10, seconds=2.1), count(10))
    assert "worker 0 is slow" in caplog.text and "worker 1" not in caplog.text


def test_worker_without_steps_is_named(clock, caplog):
    training = Training(clock)
    training.report.on_train_begin()
    training.epoch(0, count(0, seconds=0.0), count(20))
    assert "worker 0 made no step in epoch 1: it has ended or does not answer." in caplog.text


def test_few_steps_are_not_judged(clock, caplog):
    training = Training(clock, mode=Synchronous())
    training.report.on_train_begin()
    training.epoch(0, count(3), count(3, seconds=9.0, held_up_seconds=1.9))
    training.epoch(1, count(3), count(0, seconds=0.0))
    assert not caplog.records


@pytest.mark.parametrize(
    ("mode", "waited", "hints"),
    [
        (Synchronous(), (0.1, 0.6), True),
        (Synchronous(), (0.1, 0.4), False),  # a fifth of the time
        (Synchronous(), (0.7, 0.7), False),  # the one as often as the other
        (Synchronous(backup_workers=1), (0.1, 0.6), False),
        (Asynchronous(), (0.1, 0.6), False),
    ],
)
def test_backup_workers_are_suggested_once_where_they_help(clock, caplog, mode, waited, hints):
    training = Training(clock, mode=mode)
    training.report.on_train_begin()
    for number in range(2):
        training.epoch(number, *(count(10, held_up_seconds=seconds) for seconds in waited))
    hint = (
        "WorkerReport: the others waited for worker 1 during 30 % of the time. `Synchronous(backup_workers=1)` ends "
        "each round without its slowest worker."
    )
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [hint] * hints


def test_counts_continue_after_a_restart(clock):
    before, after = Training(clock), Training(clock)
    before.report.on_train_begin()
    before.epoch(0, count(10), count(20))
    before.report.on_epoch_begin(1)
    before.do(count(3, staleness=1.0), count(5))
    clock.now += 1.5
    state = before.report.get_state()
    clock.now += 1000.0
    after.report.on_train_begin()
    after.report.on_epoch_begin(1)
    clock.now += 1000.0
    after.report.set_state(state)
    after.do(count(1, staleness=3.0), count(2))
    clock.now += 0.5
    logs = {}
    after.report.on_epoch_end(1, logs)
    assert [logs[f"worker_0_{name}"] for name in ("steps", "samples_per_second", "staleness")] == [4, 16, 1.5]
    assert logs["worker_1_steps"] == 7
    assert after.report.table().splitlines()[0] == "Workers (41 steps in 4.0 s):"


def test_counts_begin_at_zero_with_another_number_of_workers(clock):
    before, after = Training(clock), Training(clock, workers=3)
    before.report.on_train_begin()
    before.epoch(0, count(10), count(20))
    after.report.on_train_begin()
    after.report.set_state(before.report.get_state())
    assert after.epoch(1, count(1), count(2), count(3))["worker_2_steps"] == 3


def test_other_strategies_are_rejected_with_the_remedy():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(
        ValueError, match=r"Received: a model created under .*Expected: `tfdist.strategies.ParameterServer"
    ):
        model.fit(np.ones([2, 1]), np.ones([2, 1]), verbose=0, callbacks=[WorkerReport()])


def test_writers_of_logs_behind_it_have_the_numbers_and_others_are_warned_of(clock, tmp_path):
    training = Training(clock)
    first, last = (keras.callbacks.CSVLogger(tmp_path / name) for name in ("first.csv", "last.csv"))
    callbacks = keras.callbacks.CallbackList([first, training.report, last])
    for callback in callbacks.callbacks:
        callback.set_model(training.report.model)
    training.report.model.stop_training = False
    with pytest.warns(UserWarning, match=r"Received: CSVLogger before it\. Expected: WorkerReport before them"):
        callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    training.do(count(4), count(6))
    clock.now += 1.0
    callbacks.on_epoch_end(0, {"loss": 1.0})
    callbacks.on_train_end()
    seen, all_seen = ((tmp_path / name).read_text().splitlines() for name in ("first.csv", "last.csv"))
    assert "worker" not in seen[0]
    assert next(csv.DictReader(all_seen))["worker_1_steps"] == "6.0"


def test_time_at_work_begins_when_the_last_push_has_ended(clock):
    counts = StatsCollector(2)
    report = {"staleness": 0, "samples": 1, "bytes_pushed": 1, "bytes_pulled": 1}
    clock.now = 101.0  # both are scheduled
    clock.now = 103.0
    counts.add({**report, "worker": 0}, scheduled_at=101.0)
    clock.now = 106.0
    counts.add({**report, "worker": 0}, scheduled_at=101.5)  # scheduled behind the first, which ended at 103
    counts.add({**report, "worker": 1}, scheduled_at=101.0)
    counts.add_held_up(1, 0.5)
    counts.add_held_up(1, 0.25)
    assert [(one.seconds, one.held_up_seconds) for one in counts.stats] == [(5.0, 0.0), (5.0, 0.75)]
