"""Training on a cluster of workers and parameter servers: what the chief schedules, what workers compute and push."""

from tfdist.parameter_server.push_statistics import WorkerStats

__all__ = ["WorkerStats"]
