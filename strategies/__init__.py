"""Distribution strategies for Keras 3: drop-in subclasses of those of `tf.distribute`."""

from tfdist.parameter_server.modes import Asynchronous, Synchronous
from tfdist.strategies.mirrored import MirroredStrategy
from tfdist.strategies.multi_worker import MultiWorkerMirroredStrategy
from tfdist.strategies.parameter_server import ParameterServerStrategy

__all__ = [
    "Asynchronous",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "Synchronous",
]
