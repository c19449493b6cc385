"""Where the workers of a strategy meet whose checkpoints are on the own disk of each host."""

import socket
from collections.abc import Callable
from typing import Any

from tfdist.host_storage.host_store import HostStore
from tfdist.host_storage.meeting import Place
from tfdist.recovery.worker_calls import own_task, task_of
from tfdist.recovery.worker_coordination import Coordination, WorkerCoordination
from tfdist.tensorflow_internals.placed_strategy import placed_devices
from tfdist.utils.cores_and_ports import host_and_port


def meet(store: HostStore, coordination: Coordination, strategy: Any) -> Callable[[], None]:
    """Meets the other workers, all of which call this when a `fit` begins. Returns a function that ends the meeting.

    Raises:
        ValueError: If the strategy needs a directory that all processes share.
        CheckpointError: See `HostStore.meet`.
    """
    reason = ""
    if not isinstance(coordination, WorkerCoordination):
        reason = "elastic training, in which the workers that are left complete the checkpoint of a lost one"
    elif any(task_of(device) != own_task() for device in placed_devices(strategy)):
        reason = "a model on the devices of several workers, each of which writes files of TensorFlow"
    if reason:
        raise ValueError(
            f"These checkpoints need a disk that all workers share. Received: shared=False, and {reason}. Expected: "
            "a directory on a file system that all workers share, or the address of an object store (not for models on "
            "the devices of several workers). Leave shared=False out."
        )
    assert isinstance(coordination, WorkerCoordination)
    return store.meet(coordination, _place_of(strategy) if coordination.num_workers > 1 else Place("", "", 0))


def _place_of(strategy: Any) -> Place:
    resolver = strategy.cluster_resolver
    address = resolver.cluster_spec().as_dict()[resolver.task_type][resolver.task_id]
    return Place(socket.gethostname(), *host_and_port(address))
