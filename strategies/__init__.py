"""Distribution strategies for Keras 3: drop-in subclasses of the strategies of `tf.distribute`."""

from tfdist.versions import require_supported_versions

require_supported_versions()  # before anything imports TensorFlow, so that the error says what to install

from tfdist.load_balancing.share_planning import LoadBalancing  # noqa: E402
from tfdist.local_updates.local_modes import DiLoCo, LocalSGD  # noqa: E402
from tfdist.parameter_server.modes import (  # noqa: E402
    Asynchronous,
    FederatedAveraging,
    Synchronous,
)
from tfdist.pipeline.pipeline import Pipeline  # noqa: E402
from tfdist.sharded_state.state_sharding import ShardedState  # noqa: E402
from tfdist.strategies.elastic_loop import ElasticLoop  # noqa: E402
from tfdist.strategies.mirrored_strategy import MirroredStrategy  # noqa: E402
from tfdist.strategies.model_parallel_strategy import ModelParallelStrategy  # noqa: E402
from tfdist.strategies.multi_worker_strategy import MultiWorkerMirroredStrategy  # noqa: E402
from tfdist.strategies.parameter_server_strategy import ParameterServerStrategy  # noqa: E402
from tfdist.strategies.planned_strategy import planned  # noqa: E402
from tfdist.tensor_parallel.auto_layout import auto_layout  # noqa: E402

__all__ = [
    "Asynchronous",
    "DiLoCo",
    "ElasticLoop",
    "FederatedAveraging",
    "LoadBalancing",
    "LocalSGD",
    "MirroredStrategy",
    "ModelParallelStrategy",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "Pipeline",
    "ShardedState",
    "Synchronous",
    "auto_layout",
    "planned",
]
