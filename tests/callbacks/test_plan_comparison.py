"""What the reports measure of a training under a plan, and what they print."""

import dataclasses
import functools
import math
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from dense_model import compiled
from fake_strategy import FakeStrategy
from replaced_clocks import set_clock
from report_runs import fit, silent
from written_plans import plan

from tfdist.callbacks import CommunicationReport, FailureRecovery, WorkerReport, plan_comparison, worker_report
from tfdist.callbacks.plan_comparison import RoundMeter, StepMeter
from tfdist.collectives import CommunicationStats, LinkStats
from tfdist.parameter_server.push_statistics import WorkerStats
from tfdist.strategies import MirroredStrategy

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.fixture
def clock(monkeypatch):
    return set_clock(monkeypatch, plan_comparison)


def epoch(meter, clock, seconds, *, first=0, steps_per_execution=1):
    """An epoch whose executions take `seconds`; then an hour of evaluation."""
    step = first
    for each in seconds:
        meter.begin_steps(step)
        clock.now += each
        step += steps_per_execution
        meter.end_steps(step - 1)
    clock.now += 3600
    meter.end_epoch()


def test_the_first_executions_are_left_out(clock):
    strategy = FakeStrategy(plan=plan())
    meter = StepMeter.of(strategy)
    epoch(meter, clock, [60.0, 5.0, 1.0, 0.25, 0.25, 0.5, 9.0])
    strategy.communication = CommunicationStats(wire_bytes=70)
    found = meter.comparison()
    assert found.measured_step_seconds == pytest.approx(1 / 3)
    assert (found.planned_step_seconds, found.planned_wire_bytes, found.measured_wire_bytes) == (0.1, 1000, 10.0)


def test_the_first_epoch_is_left_out_if_others_follow(clock):
    meter = StepMeter.of(FakeStrategy(plan=plan()))
    epoch(meter, clock, [60.0, 1.0, 1.0, 1.0, 1.0, 1.0, 60.0])
    epoch(meter, clock, [60.0, 2.0, 2.0])
    assert meter.comparison().measured_step_seconds == 1.0, "one step of the second epoch is not enough"
    epoch(meter, clock, [60.0, 2.0, 2.0, 60.0])  # the first step waits for workers that begin the epoch later
    assert meter.comparison().measured_step_seconds == 2.0


def test_executions_of_several_steps_and_an_epoch_that_begins_in_its_middle(clock):
    strategy = FakeStrategy(plan=plan(), communication=CommunicationStats(wire_bytes=5))
    meter = StepMeter.of(strategy)
    epoch(meter, clock, [9.0, 9.0, 9.0, 1.0, 1.0], first=7, steps_per_execution=4)
    strategy.communication = CommunicationStats(wire_bytes=45)
    assert meter.comparison().measured_step_seconds == 0.25
    assert meter.comparison().measured_wire_bytes == 2.0


def test_keras_may_report_the_ends_of_steps_late_and_in_another_order(clock):
    strategy = FakeStrategy(plan=plan())
    meter = StepMeter.of(strategy)
    for step in range(3):
        meter.begin_steps(step)
    for step in (1, 2, 0):
        meter.end_steps(step)
    strategy.communication = CommunicationStats(wire_bytes=30)
    assert meter.comparison().measured_wire_bytes == 10.0


def test_of_stages_the_worker_counts_that_sends_the_most(clock):
    links = {
        ("/job:chief/replica:0/task:0/device:CPU:0", "/job:worker/replica:0/task:0/device:CPU:0"): 900,
        ("/job:worker/replica:0/task:0/device:CPU:0", "/job:worker/replica:0/task:1/device:CPU:0"): 20,
        ("/job:worker/replica:0/task:1/device:CPU:0", "/job:worker/replica:0/task:0/device:CPU:0"): 30,
        ("/job:worker/replica:0/task:1/device:GPU:0", "/job:worker/replica:0/task:0/device:CPU:0"): 30,
    }

    class Stages(FakeStrategy):
        scale = 0

        def communication_by_link(self, step=None):
            assert step == "train_step"
            return {link: LinkStats(activation_bytes=nbytes * self.scale) for link, nbytes in links.items()}

    strategy = Stages(plan=plan())
    meter = StepMeter.of(strategy)
    epoch(meter, clock, [1.0, 1.0])
    strategy.scale = 2
    assert meter.comparison().measured_wire_bytes == 60.0


def test_short_trainings_are_not_measured(clock):
    meter = StepMeter.of(FakeStrategy(plan=plan()))
    assert dataclasses.astuple(meter.comparison()) == (0.1, None, 1000, None)
    assert "not measured: the training was too short" in str(meter.comparison())


def test_without_a_prediction_nothing_is_compared():
    of_other_workers = plan(step_seconds=math.nan)
    servers = (WorkerStats(),)
    for strategy in (FakeStrategy(), FakeStrategy(plan=of_other_workers)):
        assert StepMeter.of(strategy) is RoundMeter.of(strategy) is None
    assert RoundMeter.of(FakeStrategy(plan=plan())) is None  # no servers
    assert RoundMeter.of(FakeStrategy(plan=plan(), worker_stats=servers)) is not None


def test_under_parameter_servers_epochs_after_the_first_count(capsys, monkeypatch):
    """Two workers push 100 bytes each in a round of a batch."""
    clock = set_clock(monkeypatch, worker_report)
    strategy = FakeStrategy(
        plan=plan(step_seconds=0.2, wire_bytes=100),
        worker_stats=(WorkerStats(),) * 2,
        num_workers=2,
        gradient_accumulation_steps=1,
        mode=None,
    )
    report = WorkerReport()
    report.set_model(SimpleNamespace(distribute_strategy=strategy))
    report.on_train_begin()
    for number in range(3):
        report.on_epoch_begin(number)
        clock.now += 60.0 if number == 0 else 2.5
        strategy.communication = CommunicationStats(updates=10 * (number + 1), wire_bytes=2000 * (number + 1))
        report.on_epoch_end(number, {})
    found = report.plan_comparison
    assert found.measured_step_seconds == pytest.approx(0.25)
    assert found.measured_wire_bytes == 100.0
    report.on_train_end()
    assert "Step: planned 200 ms, measured 250 ms" in capsys.readouterr().out


def test_the_report_of_a_training(cpus, capsys):
    strategy = MirroredStrategy(cpus[:2])
    strategy.plan = plan(wire_bytes=12480)
    report = CommunicationReport()
    fit(compiled(strategy), report, batch_size=4, epochs=2)
    *_, line = capsys.readouterr().out.splitlines()
    assert line == str(report.plan_comparison)
    assert line.startswith("Step: planned 100 ms, measured ") and line.endswith("12.5 kB, measured 12.5 kB.")
    assert report.plan_comparison.measured_wire_bytes == 12480
    fit(compiled(strategy), silent(), batch_size=4)
    assert capsys.readouterr().out == ""


def test_a_training_without_a_plan_prints_no_line(cpus, capsys):
    report = CommunicationReport()
    fit(compiled(MirroredStrategy(cpus[:2])), report)
    assert report.plan_comparison is None and "planned" not in capsys.readouterr().out


def test_a_resumed_training_measures_its_own_process(cpus, tmp_path):
    """It continues in the second epoch, and counts the bytes of its own steps only."""
    seen = []

    def stop(batch, logs):
        seen.append(batch)
        if len(seen) == 17:
            raise KeyboardInterrupt

    strategy = MirroredStrategy(cpus[:2])
    strategy.plan = plan(wire_bytes=12480)
    recovery = functools.partial(FailureRecovery, tmp_path, every_steps=2, background=False)
    with pytest.raises(KeyboardInterrupt):
        stopper = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
        fit(compiled(strategy), silent(), recovery(), stopper, batch_size=4, epochs=3)
    report = silent()
    logs = fit(compiled(strategy), report, recovery(), batch_size=4, epochs=3)
    assert report.plan_comparison.measured_wire_bytes == 12480
    assert report.plan_comparison.measured_step_seconds is not None
    np.testing.assert_array_equal(logs["wire_bytes"], [12480] * 3)
