"""Keras callbacks for training on many replicas."""

from tfdist.callbacks.gradient_accumulation import GradientAccumulation

__all__ = ["GradientAccumulation"]
