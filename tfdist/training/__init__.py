"""A Keras step on many replicas: sample shares, micro-batches, optimizer updates, synchronized metrics.

Public are functions for a custom `train_step` whose loss tfdist cannot follow.
"""

from tfdist.training.sample_shares import scale_loss_for_distribution, unscale_loss_for_distribution

__all__ = ["scale_loss_for_distribution", "unscale_loss_for_distribution"]
