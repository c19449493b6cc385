"""Distribution strategies for Keras 3: drop-in subclasses of the strategies of `tf.distribute`."""

from tfdist.parameter_server.modes import Asynchronous, Synchronous
from tfdist.strategies.mirrored_strategy import MirroredStrategy
from tfdist.strategies.multi_worker_strategy import MultiWorkerMirroredStrategy
from tfdist.strategies.parameter_server_strategy import ParameterServerStrategy

__all__ = [
    "Asynchronous",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "Synchronous",
]
