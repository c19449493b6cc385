"""TrainingMonitor: numbers, intervals, strategies, curves across restarts."""

import functools
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import report_runs
import tensorflow as tf
from dense_model import compiled
from fake_strategy import FakeStrategy
from stock_strategy import stock_mirrored

from tfdist.callbacks import (
    CommunicationReport,
    FailureRecovery,
    GradientAccumulation,
    TrainingMonitor,
    training_monitor,
)
from tfdist.collectives.exchange_timer import ExchangeTimer
from tfdist.parameter_server.push_statistics import WorkerStats
from tfdist.strategies import MirroredStrategy

pytestmark = pytest.mark.usefixtures("cpus")

ALWAYS = {"tfdist/restarts", "tfdist/step_ms"}
SENT = {"tfdist/wire_bytes", "tfdist/dense_bytes", "tfdist/compression_ratio"}
TIMES = {"tfdist/encode_ms", "tfdist/exchange_ms", "tfdist/decode_ms"}


fit = functools.partial(report_runs.fit, batch_size=4)


def steps(points):
    return [step for step, _ in points]


def values(points):
    return {value for _, value in points}


def test_the_numbers_are_those_by_hand(cpus, tmp_path, curves):
    model = compiled(strategy := MirroredStrategy(cpus[:2], compression="int8"))
    fit(model, TrainingMonitor(tmp_path, every_steps=5), epochs=2)  # 24 steps
    found = curves(tmp_path / "tfdist")
    assert set(found) == ALWAYS | SENT | {"tfdist/residual_norm", "tfdist/replicas", "tfdist/world_size"}
    assert all(steps(points) == [5, 10, 15, 20, 24] for points in found.values())
    # A kernel of 64 x 48 in 12 blocks of 260 bytes, and a bias of 48 that is too small to be compressed.
    assert values(found["tfdist/dense_bytes"]) == {12288 + 192}
    assert values(found["tfdist/wire_bytes"]) == {12 * 260 + 192}
    assert values(found["tfdist/compression_ratio"]) == {np.float32(12480 / 3312)}
    assert values(found["tfdist/replicas"]) == {2.0} and values(found["tfdist/restarts"]) == {0.0}
    residuals = [
        entries["residual"].numpy() for entries in strategy.compression_state.replicas["replica_0"].entries.values()
    ]
    norm = np.sqrt(sum(np.square(residual).sum() for residual in residuals))
    assert norm > 0
    np.testing.assert_allclose(found["tfdist/residual_norm"][-1][1], norm, rtol=1e-5)
    assert len(values(found["tfdist/residual_norm"])) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["tfdist"]


@pytest.mark.parametrize(
    ("make", "tags"),
    [
        (tf.distribute.get_strategy, set()),
        (lambda: MirroredStrategy(["CPU:0"]), {"tfdist/world_size"}),
        (lambda: stock_mirrored(["CPU:0", "CPU:1"]), {"tfdist/replicas"}),
        (lambda: MirroredStrategy(["CPU:0", "CPU:1"]), SENT | {"tfdist/replicas", "tfdist/world_size"}),
    ],
    ids=["none", "one replica", "stock", "uncompressed"],
)
def test_what_does_not_apply_is_not_written(tmp_path, curves, make, tags):
    fit(compiled(make()), TrainingMonitor(tmp_path), batch_size=24)
    found = curves(tmp_path / "tfdist")
    assert set(found) == ALWAYS | tags
    assert {step for points in found.values() for step in steps(points)} == {2}


def test_only_the_chief_writes(cpus, tmp_path, monkeypatch):
    model = compiled(strategy := MirroredStrategy(cpus[:2]))
    monkeypatch.setattr(type(strategy.extended), "should_save_summary", property(lambda _: False))
    fit(model, TrainingMonitor(tmp_path, every_steps=1, timing=True))
    assert not list(tmp_path.iterdir())


def test_updates_count_for_bytes_and_executions_for_steps(cpus, tmp_path, curves):
    model = compiled(MirroredStrategy(cpus[:2]), steps_per_execution=3)
    fit(model, GradientAccumulation(5), TrainingMonitor(tmp_path, every_steps=2))  # 12 steps, 2 updates
    found = curves(tmp_path / "tfdist")
    assert steps(found["tfdist/restarts"]) == [3, 6, 9, 12]
    assert steps(found["tfdist/step_ms"]) == [6, 9, 12], "the first execution was traced"
    assert found["tfdist/wire_bytes"] == [(6, 12480.0), (12, 12480.0)]


def test_steps_of_several_fits_are_counted_together(cpus, tmp_path, curves):
    model, monitor = compiled(MirroredStrategy(cpus[:2])), TrainingMonitor(tmp_path, every_steps=8)
    board = keras.callbacks.TensorBoard(tmp_path, write_graph=False)
    for _ in range(2):
        fit(model, monitor, board)
    fit(model, TrainingMonitor(tmp_path, every_steps=8))
    assert steps(curves(tmp_path / "tfdist")["tfdist/replicas"]) == [8, 12, 16, 24, 8, 12], "another training's stay"
    assert "epoch_loss" in curves(tmp_path / "train")


def test_durations_are_measured_once_for_all_callbacks(cpus, tmp_path, curves, monkeypatch):
    made, clocks, timestamp = [], [], tf.timestamp
    monkeypatch.setattr(tf, "timestamp", lambda *a, **k: clocks.append(k) or timestamp(*a, **k))
    init = ExchangeTimer.__init__
    monkeypatch.setattr(ExchangeTimer, "__init__", lambda self, host: made.append(self) or init(self, host))
    model = compiled(strategy := MirroredStrategy(cpus[:2], compression="int8"))
    report = CommunicationReport(timing=True, print_table=False)
    for number, callbacks in enumerate(
        [[TrainingMonitor(tmp_path, timing=True), report], [report, TrainingMonitor(tmp_path, timing=True)]], start=1
    ):
        history = fit(model, *callbacks)
        assert (len(made), len(clocks)) == (number, 4 * number), "one stopwatch, the clocks of the only bucket"
        assert strategy.gradient_reduction.durations_by_method() == {}, "it is taken away in the end"
        assert min(history[f"{name}_seconds"][0] for name in ("encode", "exchange", "decode")) > 0
    found = curves(tmp_path / "tfdist")
    assert set(found) == ALWAYS | SENT | TIMES | {"tfdist/residual_norm", "tfdist/replicas", "tfdist/world_size"}
    of_fit = {name: [value for step, value in found[f"tfdist/{name}_ms"][2:]] for name in ("encode", "exchange")}
    # The points of steps 10 and 12 are averages over 10 and 2 updates.
    for name, (first, second) in of_fit.items():
        seconds = history[f"{name}_seconds"][0]
        np.testing.assert_allclose((10 * first + 2 * second) / 12 / 1e3, seconds, rtol=1e-4)


class Interruption(Exception):
    pass


def interrupted_at(step):
    counter = {"steps": 0}

    def count(_, logs):
        counter["steps"] += 1
        if counter["steps"] == step:
            raise Interruption

    return keras.callbacks.LambdaCallback(on_train_batch_end=count)


def test_an_interrupted_training_has_the_curves_of_one_that_was_not(cpus, tmp_path, curves, monkeypatch):
    def train(*callbacks, name):
        recovery = FailureRecovery(tmp_path / f"{name}-checkpoints", every_steps=6, background=False)
        model = compiled(MirroredStrategy(cpus[:2], compression="int8"))
        fit(model, TrainingMonitor(tmp_path / name, every_steps=2), recovery, *callbacks, epochs=2)
        assert recovery.saves == 5 - 2 * (name == "broken")
        return curves(tmp_path / name / "tfdist")

    complete = train(name="complete")
    assert steps(complete["tfdist/checkpoint_stall_ms"]) == [8, 14, 20], "the last save comes after the last point"
    assert min(values(complete["tfdist/checkpoint_stall_ms"])) > 0
    with pytest.raises(Interruption):
        train(interrupted_at(17), name="broken")
    assert steps(curves(tmp_path / "broken" / "tfdist")["tfdist/restarts"]) == list(range(2, 17, 2))
    monkeypatch.setattr(training_monitor, "run_id", lambda: "another process")
    broken = train(interrupted_at(100), name="broken")
    assert set(broken) == set(complete)
    for tag in set(complete) - {"tfdist/step_ms", "tfdist/checkpoint_stall_ms", "tfdist/restarts"}:
        assert broken[tag] == complete[tag], tag
    assert broken["tfdist/restarts"] == [(step, float(step > 12)) for step in range(2, 25, 2)]


def test_attempt_without_a_checkpoint_replaces_the_curves(cpus, tmp_path, curves, monkeypatch):
    model = compiled(MirroredStrategy(cpus[:1]))
    broken = TrainingMonitor(tmp_path, every_steps=2)
    with pytest.raises(Interruption):
        fit(model, broken, interrupted_at(7))
    fit(model, TrainingMonitor(tmp_path, every_steps=2))
    again = TrainingMonitor(tmp_path, every_steps=3)
    again._training = broken._training  # as in the next attempt of a run
    monkeypatch.setenv("TFDIST_ATTEMPT", "1")
    fit(model, again)
    found = curves(tmp_path / "tfdist")["tfdist/restarts"]
    assert found == [(step, 0.0) for step in range(2, 13, 2)] + [(step, 1.0) for step in range(3, 13, 3)]


def test_attempts_of_a_run_give_their_trainings_the_same_names(monkeypatch):
    monkeypatch.setenv("TFDIST_RUN_ID", "abc")
    training_monitor.run_id.cache_clear()
    first, second = TrainingMonitor("x"), TrainingMonitor("x")
    training_monitor.run_id.cache_clear()
    names = [monitor._training.rpartition("-") for monitor in (first, second)]
    assert [run for run, _, _ in names] == ["abc", "abc"]
    assert int(names[1][2]) == int(names[0][2]) + 1


def test_each_worker_of_parameter_servers_has_a_run(tmp_path, curves, clock):
    def count(steps, staleness):
        return WorkerStats(steps, 8 * steps, staleness, 4, 100 * steps, 300 * steps)

    strategy = FakeStrategy(
        worker_stats=(count(7, 0.0), count(0, 0.0), count(0, 0.0)),
        num_workers=3,
        extended=SimpleNamespace(should_save_summary=True),
    )
    monitor = TrainingMonitor(tmp_path, every_steps=2)
    monitor.set_model(SimpleNamespace(distribute_strategy=strategy))
    monitor.on_train_begin()
    for batch, counts in enumerate(
        [(count(7, 0.0), count(2, 0.5), count(0, 0.0)), (count(17, 0.0), count(4, 1.0), count(0, 0.0))]
    ):
        monitor.on_train_batch_begin(batch)
        strategy.worker_stats = counts
        clock.now += 2.0
        monitor.on_train_batch_end(batch)
    monitor.on_train_end()
    assert set(curves(tmp_path / "tfdist")) == {"tfdist/restarts", "tfdist/step_ms", "tfdist/world_size"}
    assert curves(tmp_path / "tfdist")["tfdist/world_size"] == [(2, 3.0)]
    found = [curves(tmp_path / "tfdist" / f"worker-{worker}") for worker in range(3)]
    assert [{tag: value for tag, [(_, value)] in of_worker.items()} for of_worker in found] == [
        {
            "tfdist/staleness": 0.0,
            "tfdist/bytes_pushed": 100.0,
            "tfdist/bytes_pulled": 300.0,
            "tfdist/samples_per_second": 20.0,
        },
        {
            "tfdist/staleness": 1.0,
            "tfdist/bytes_pushed": 100.0,
            "tfdist/bytes_pulled": 300.0,
            "tfdist/samples_per_second": 8.0,
        },
        {},
    ]


@pytest.mark.parametrize("every_steps", [0, -1, 2.0, 2.5, True, None, float("nan"), float("inf")], ids=str)
def test_the_interval_is_checked(every_steps):
    with pytest.raises(ValueError, match=r"Invalid `every_steps`. Received: every_steps=.*Expected: a whole"):
        TrainingMonitor("x", every_steps=every_steps)
