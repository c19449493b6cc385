"""Keras callbacks for training on many replicas."""

from tfdist.callbacks.communication_report import CommunicationReport
from tfdist.callbacks.failure_recovery import FailureRecovery
from tfdist.callbacks.gradient_accumulation import GradientAccumulation

__all__ = ["CommunicationReport", "FailureRecovery", "GradientAccumulation"]
