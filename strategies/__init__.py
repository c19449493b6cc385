"""Distribution strategies for Keras 3: drop-in subclasses of those of `tf.distribute`."""

from tfdist.strategies.mirrored import MirroredStrategy
from tfdist.strategies.multi_worker import MultiWorkerMirroredStrategy

__all__ = ["MirroredStrategy", "MultiWorkerMirroredStrategy"]
