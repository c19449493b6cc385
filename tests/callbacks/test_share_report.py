"""WorkerReport of workers that share the rows of batches."""

import logging

import pytest
from replaced_clocks import set_clock
from worker_training import Training

from tfdist.callbacks import worker_report
from tfdist.load_balancing.row_shares import ShareStats

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.fixture
def clock(monkeypatch):
    return set_clock(monkeypatch, worker_report)


class Shares:
    """Workers that share the rows of batches."""

    def __init__(self, *stats):
        self.now, self.measures = stats, True

    def stats(self):
        return self.now


def test_workers_that_share_rows_report_shares_computation_and_waiting(clock, capsys, caplog):
    training = Training(clock)
    shares = Shares(ShareStats(0.5, 10, 320, 1.0, 0.0), ShareStats(0.5, 10, 320, 1.0, 0.0))
    training.strategy.worker_stats, training.strategy.row_shares = (), shares
    training.report.on_train_begin()
    training.report.on_epoch_begin(0)
    shares.now = ShareStats(0.75, 30, 1280, 2.0, 0.5), ShareStats(0.25, 30, 640, 2.4, 0.1)
    clock.now += 2.0
    logs = {}
    with caplog.at_level(logging.WARNING, logger="tfdist"):
        training.report.on_epoch_end(0, logs)
    training.report.on_train_end()
    assert [logs[f"worker_0_{name}"] for name in ("share", "samples", "compute_ms", "wait_ms")] == [0.75, 960, 50, 25]
    assert [logs[f"worker_1_{name}"] for name in ("share", "samples", "compute_ms")] == [0.25, 320, 70]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Workers (20 steps in 2.0 s):"
    assert lines[3].split() == ["0", "75", "%", "960", "48.0", "50.0", "25.0"]
    assert "worker 1 is slow: 229 samples per second at work in epoch 1; the median of the others is 960" in caplog.text


def test_the_chief_alone_prints_shares_and_continues_after_a_restart(clock, capsys):
    states = []
    for rank in (0, 1):
        training = Training(clock)
        training.strategy.worker_stats, training.strategy.rank = (), rank
        training.strategy.row_shares = shares = Shares(ShareStats(0.5, 10, 320, 1.0, 0.0))
        training.report.on_train_begin()
        if states:
            training.report.set_state(states[0])
        shares.now = (ShareStats(0.5, 14, 448, 1.4, 0.0),)
        states.append(training.report.get_state())
        training.report.on_train_end()
    assert capsys.readouterr().out.count("Workers (4 steps") == 1
    assert states[1]["training"][0]["steps"] == 8


def test_workers_that_train_by_themselves_do_not_know_each_others_times(clock):
    training = Training(clock)
    training.strategy.worker_stats, training.strategy.row_shares = (), Shares(ShareStats())
    training.strategy.local_updates = object()
    with pytest.raises(ValueError, match="WorkerReport is for workers that push to parameter servers, or share"):
        training.report.on_train_begin()


def test_workers_that_may_be_lost_know_each_others_times_only_if_rows_are_shared_on_request(clock):
    training = Training(clock)
    training.strategy.worker_stats, training.strategy.row_shares = (), Shares(ShareStats())
    training.strategy.row_shares.measures = False
    with pytest.raises(ValueError, match=r"Expected: .*MultiWorkerMirroredStrategy\(load_balancing=True\)"):
        training.report.on_train_begin()
