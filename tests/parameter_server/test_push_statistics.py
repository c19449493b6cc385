"""Collects the statistics of workers. Times are in tests/callbacks/test_worker_report.py."""

from tfdist.parameter_server.push_statistics import StatsCollector


def test_pushes_are_counted_by_worker():
    collector = StatsCollector(2)
    report = {"worker": 1, "bytes_pushed": 10, "bytes_pulled": 100, "samples": 8}
    for staleness, counts in ((0, True), (4, True), (2, False)):
        collector.add({**report, "staleness": staleness}, counts=counts)
    idle, busy = collector.stats
    assert idle.steps == idle.samples == 0
    assert (busy.steps, busy.samples, busy.left_out) == (3, 24, 1)
    assert (busy.staleness, busy.max_staleness) == (2.0, 4)
    assert (busy.bytes_pushed, busy.bytes_pulled) == (30, 300)
