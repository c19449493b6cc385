"""Training on a cluster of workers and parameter servers: what the chief schedules, what workers compute and push."""

from tfdist.parameter_server.worker_stats import WorkerStats

__all__ = ["WorkerStats"]
