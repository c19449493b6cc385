"""Ray for `on_ray`: resources, and a place as an actor."""

import collections
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.launch.engines.engine_call import PlaceAddress, PlaceTask
from tfdist.launch.engines.place import PlaceResult, place_address, run_place, stop_places
from tfdist.utils.argument_checks import is_number

_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
# `run`, beside it `stop` and `lines`, and `address`.
_CALLS_AT_ONCE = 4
_KEPT_LINES = 10_000  # until the driver asks for them
_FLUSH_SECONDS = 5.0


def import_ray() -> Any:
    """Returns the module `ray`.

    Raises:
        ImportError: If it is not installed. The message says how to install it.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            "Ray is not installed. Received: no module `ray`. Expected: the extra `ray`. Run: pip install 'tfdist[ray]'"
        ) from error
    return ray


def check_placement(resources: Any, strategy: Any) -> None:
    """Checks `resources_per_worker` and `placement_strategy`.

    Raises:
        ValueError: If one is invalid.
    """
    is_valid = all(isinstance(name, str) and is_number(value, at_least=0) for name, value in resources.items())
    if not is_valid or not any(resources.values()):
        raise ValueError(
            f"Invalid `resources_per_worker`. Received: {resources!r}. Expected: numbers by the names of Ray's "
            'resources, at least one above 0, for example {"CPU": 2, "GPU": 1}.'
        )
    if strategy not in _STRATEGIES:
        raise ValueError(
            f"Invalid `placement_strategy`. Received: {strategy!r}. Expected: one of {', '.join(_STRATEGIES)}."
        )


def describe_resources(ray: Any) -> str:
    """Returns the resources of the cluster, and those that are free.

    Args:
        ray: The module.
    """
    names = ("CPU", "GPU", "memory")

    def chosen(found: Mapping[str, float]) -> dict[str, float]:
        return {name: value for name, value in found.items() if name in names or ":" not in name}

    return f"a cluster with {chosen(ray.cluster_resources())}, of which {chosen(ray.available_resources())} are free"


def resource_options(group: Any, rank: int, resources: Mapping[str, float]) -> dict[str, Any]:
    """Returns the options of the actor of a place.

    Args:
        group: The placement group.
        rank: Number of the place, and of its bundle.
        resources: What it needs.
    """
    strategy = import_ray().util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=rank, placement_group_capture_child_tasks=False
    )
    other = {name: value for name, value in resources.items() if name not in ("CPU", "GPU", "memory")}
    memory = {"memory": resources["memory"]} if "memory" in resources else {}
    return {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "resources": other or None,
        "scheduling_strategy": strategy,
        **memory,
    }


def explain_lost_actor(rank: int, error: Exception) -> str:
    """Returns a clause for a lost place.

    Args:
        rank: Its number.
        error: What Ray raised for it.

    Raises:
        ImportError: If Ray's node cannot import tfdist.
        Exception: `error`, if the place itself failed.
    """
    ray = import_ray()
    text = " ".join(str(error).split())
    if "No module named 'tfdist" in text or "No module named 'cloudpickle" in text:
        raise ImportError(
            f"A node of Ray cannot import tfdist. Received: {text[:300]}. Expected: tfdist and TensorFlow on all "
            "nodes, in the versions of this process. Install them there, or give a `runtime_env` to ray.init."
        ) from error
    if isinstance(error, ray.exceptions.RayTaskError):
        raise error
    return f"place {rank} was lost: {text[:300]}"


class OutputOfActors:
    """Shows the output of places in the driver. Ray itself leaves out lines that several actors print.

    Args:
        actors: Of the places.
    """

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = actors
        self._asked: dict[Any, Any] = {}  # by actor: the answer that is under way

    def show_new(self, *, is_last: bool = False) -> None:
        """Prints the lines that have come since the last call.

        Args:
            is_last: Whether to wait for the rest.
        """
        ray = import_ray()
        for _ in range(1 + is_last):  # an answer that is under way may lack the last lines
            for actor in self._actors:
                if actor not in self._asked:
                    self._asked[actor] = actor.lines.remote()
            refs = list(self._asked.values())
            ready = ray.wait(refs, num_returns=len(refs), timeout=_FLUSH_SECONDS if is_last else 0)[0]
            for actor, ref in list(self._asked.items()):
                if ref in ready:
                    del self._asked[actor]
                    with contextlib.suppress(ray.exceptions.RayError):  # the actor is lost
                        for line in ray.get(ref):
                            print(line, flush=True)


def actor_class(max_restarts: int) -> Any:
    """Returns the class of the actors.

    Args:
        max_restarts: How often Ray restarts each of them.
    """
    ray = import_ray()

    class Place(_Place):
        address = ray.method(max_task_retries=-1)(_Place.address)  # also of an actor that is being restarted

    Place.__name__ = Place.__qualname__ = "TfdistPlace"
    return ray.remote(max_concurrency=_CALLS_AT_ONCE, max_restarts=max_restarts, max_task_retries=0)(Place)


class _Place:
    """A place as an actor of Ray."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)

    def __repr__(self) -> str:
        return f"tfdist place {self._rank}"

    def address(self) -> PlaceAddress:
        return place_address(import_ray().util.get_node_ip_address())

    def run(self, task: PlaceTask) -> PlaceResult:
        return run_place(task, show=self._lines.append)

    def lines(self) -> list[str]:
        return [self._lines.popleft() for _ in range(len(self._lines))]

    def stop(self, run: str) -> None:
        stop_places(run)
