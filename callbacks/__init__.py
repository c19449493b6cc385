"""Keras callbacks for training on many replicas."""

from tfdist.versions import require_supported_versions

require_supported_versions()  # before anything imports TensorFlow, so that the error says what to install

from tfdist.callbacks.communication_report import CommunicationReport  # noqa: E402
from tfdist.callbacks.failure_recovery import FailureRecovery  # noqa: E402
from tfdist.callbacks.gradient_accumulation import GradientAccumulation  # noqa: E402
from tfdist.callbacks.spike_guard import SpikeGuard  # noqa: E402
from tfdist.callbacks.training_monitor import TrainingMonitor  # noqa: E402
from tfdist.callbacks.weight_comparison import WeightComparison  # noqa: E402
from tfdist.callbacks.worker_report import WorkerReport  # noqa: E402

__all__ = [
    "CommunicationReport",
    "FailureRecovery",
    "GradientAccumulation",
    "SpikeGuard",
    "TrainingMonitor",
    "WeightComparison",
    "WorkerReport",
]
