"""Recovery of custom training loops, and what it has in common with FailureRecovery: state, saves, restarts."""

from tfdist.versions import require_supported_versions

require_supported_versions()  # before anything imports TensorFlow, so that the error says what to install

from tfdist.recovery.loop_recovery import LoopRecovery  # noqa: E402

__all__ = ["LoopRecovery"]
