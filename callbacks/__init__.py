"""Keras callbacks for training on many replicas."""

from tfdist.callbacks.communication_report import CommunicationReport
from tfdist.callbacks.failure_recovery import FailureRecovery
from tfdist.callbacks.gradient_accumulation import GradientAccumulation
from tfdist.callbacks.training_monitor import TrainingMonitor
from tfdist.callbacks.worker_report import WorkerReport

__all__ = ["CommunicationReport", "FailureRecovery", "GradientAccumulation", "TrainingMonitor", "WorkerReport"]
