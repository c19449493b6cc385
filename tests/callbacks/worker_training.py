"""A training whose workers report what a test sets."""

from types import SimpleNamespace

from fake_strategy import FakeStrategy

from tfdist.callbacks import WorkerReport
from tfdist.parameter_server.modes import Asynchronous
from tfdist.parameter_server.push_statistics import WorkerStats


class Training:
    """A training whose workers report what the test sets."""

    def __init__(self, clock, *, mode=None, workers=2, **arguments):
        self.clock = clock
        self.strategy = FakeStrategy(worker_stats=(WorkerStats(),) * workers, mode=mode or Asynchronous())
        self.report = WorkerReport(**arguments)
        self.report.set_model(SimpleNamespace(distribute_strategy=self.strategy))

    def do(self, *done):
        """Adds `done`, counts of each worker, to what they have done."""
        zero = WorkerStats()
        self.strategy.worker_stats = tuple(
            before.since(zero.since(more)) for before, more in zip(self.strategy.worker_stats, done, strict=True)
        )

    def epoch(self, number, *done, seconds=2.0, validation=0.0):
        """Returns what the report adds to the logs of an epoch."""
        logs = {}
        self.report.on_epoch_begin(number)
        self.do(*done)
        self.clock.now += seconds
        if validation:
            self.report.on_test_begin()
            self.clock.now += validation
        self.report.on_epoch_end(number, logs)
        return logs


def count(steps=10, samples=None, seconds=1.0, staleness=0.0, **more):
    samples = 8 * steps if samples is None else samples
    return WorkerStats(steps, samples, staleness, 0, 100 * steps, 300 * steps, seconds=seconds, **more)
