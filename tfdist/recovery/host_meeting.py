"""Where the workers of a strategy meet whose checkpoints are on the own disk of each host."""

import socket
from collections.abc import Callable
from typing import Any

from tfdist.host_storage.host_store import HostStore
from tfdist.host_storage.meeting_of_hosts import Place
from tfdist.recovery.worker_calls import own_task, task_of
from tfdist.recovery.worker_coordination import Coordination, WorkerCoordination
from tfdist.tensorflow_internals.placed_strategy import placed_devices
from tfdist.utils.cores_and_ports import host_and_port


def check_strategy(argument: str, coordination: Coordination, strategy: Any) -> None:
    """Raises a ValueError for trainings whose checkpoints cannot be on several hosts, as an argument asks."""
    reason = ""
    if not isinstance(coordination, WorkerCoordination):
        reason = "elastic training, whose workers complete the checkpoint of a lost one, and restore from each other"
    elif any(task_of(device) != own_task() for device in placed_devices(strategy)):
        reason = "a model on the devices of several workers, each of which writes files of TensorFlow"
    if reason:
        raise ValueError(
            f"These checkpoints need a place that all workers share. Received: {argument}, and {reason}. Expected: "
            "a directory on a file system that all workers share, or the address of an object store (not for models on "
            f"the devices of several workers). Leave {argument.partition('=')[0]} out."
        )


def meet(store: HostStore, purpose: str, coordination: Coordination, strategy: Any) -> Callable[[], None]:
    """Meets the other workers, all of which call this when a `fit` begins. Returns a function that ends the meeting.

    Raises:
        CheckpointError: See `HostStore.meet`.
    """
    assert isinstance(coordination, WorkerCoordination)
    place = _place_of(strategy) if coordination.num_workers > 1 else Place("", "", 0)
    return store.meet(coordination, place, purpose)


def _place_of(strategy: Any) -> Place:
    resolver = strategy.cluster_resolver
    address = resolver.cluster_spec().as_dict()[resolver.task_type][resolver.task_id]
    return Place(socket.gethostname(), *host_and_port(address))
