"""on_ray: calls a function in new processes beside actors of Ray."""

import collections
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tfdist.cluster import LOST_RUN_EXIT_CODE
from tfdist.launch.engines.engine_call import (
    STOP_SECONDS,
    EngineCall,
    LostPlaceError,
    PlaceAddress,
    PlaceResult,
    PlaceTask,
    RoundEnd,
    run_rounds,
)
from tfdist.launch.engines.place import place_address, run_place, stop_places
from tfdist.launch.run_spec import START_TIMEOUT_SECONDS
from tfdist.utils.argument_checks import is_number
from tfdist.utils.optional_modules import import_optional

Value = TypeVar("Value")
_LOOK_SECONDS = 0.5
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
# An actor executes `run`, `stop`, `lines` and `address` at the same time.
_CALLS_AT_ONCE = 4
_KEPT_LINES = 10_000  # until the driver asks for them
_FLUSH_SECONDS = 5.0


def on_ray(
    function: Callable[..., Value],
    *args: Any,
    workers: int,
    resources_per_worker: Mapping[str, float] | None = None,
    placement_strategy: str = "PACK",
    parameter_servers: int = 0,
    chief: bool = False,
    elastic: int | None = None,
    max_restarts: int = 0,
    threads_per_worker: int | None = None,
    seed: int | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    grace_seconds: float = 5.0,
    start_timeout_seconds: float = START_TIMEOUT_SECONDS,
) -> list[Value]:
    """Calls a function in new processes on the nodes of Ray, and returns its values, by rank.

    It does on the hosts of Ray what `from_notebook` does on this one. Each worker is beside an actor, and all actors
    are in one placement group, so Ray starts all of them, or none. Without a connection to Ray it calls `ray.init()`.

    The loss of an actor or its node ends the run; with `max_restarts` Ray restarts the actor, on another node if need
    be, the function is called again, and with `FailureRecovery` the training resumes. An interrupt, or the end of the
    driver, ends the processes with SIGTERM, so that `FailureRecovery` can save, and kills them after `grace_seconds`.
    With `elastic` the others train on without an actor that is lost, and the end of the driver kills the processes.

    >>> from tfdist.launch import on_ray
    >>> weights = on_ray(train, workers=4, resources_per_worker={"CPU": 2, "GPU": 1})  # doctest: +SKIP

    Args:
        function: Any callable that can be pickled with the objects it uses.
        *args: Positional arguments of the function.
        workers: Number of workers.
        resources_per_worker: What Ray reserves for each worker, as `{"CPU": 2, "GPU": 1}`; by default `{"CPU": 1}`.
        placement_strategy: How Ray places the group: "PACK" puts workers on few nodes where possible, "STRICT_PACK" on
            one, "SPREAD" on many, "STRICT_SPREAD" each on another.
        parameter_servers: Number of parameter servers. With any, a chief alone calls the function.
        chief: Whether a chief alone calls the function, for `ModelParallelStrategy`.
        elastic: The least number of workers that train: a worker that is lost is started again alone, while the others
            train on, as by `tfdist run --elastic`. So is an actor, if Ray restarts it on the same host. None: the
            loss of one is a failure of all.
        max_restarts: How often to restart all workers after a failure, and to call the function again.
        threads_per_worker: Threads of each worker. Defaults to its "CPU".
        seed: Where the random generators of Python, NumPy and TensorFlow start in every worker, and after every
            restart, unless `function` seeds them. By default TFDIST_SEED of this process, else a new one for each call.
        log_dir: Directory for the workers' output on their hosts, in files `rank-<rank>.log`, in addition.
        grace_seconds: Seconds from SIGTERM to SIGKILL when workers are ended.
        start_timeout_seconds: How long to wait for the resources, and then for the processes to start.

    Returns:
        The function's return value in each worker, by rank; with a chief, its one value. With `elastic` None for a
        worker that was lost, and has not joined the others before the end.

    Raises:
        TypeError: If `function` is not callable, or something cannot be pickled.
        ValueError: If an option is invalid.
        TimeoutError: If Ray has not had the resources in time; it says which.
        tfdist.launch.WorkerError: If a worker failed, with its rank and its traceback, or an actor was lost.
        ImportError: If Ray is not installed (the extra `ray`), or tfdist is not on the nodes of Ray.
    """
    call = EngineCall.of(
        function,
        args,
        caller="on_ray",
        workers=workers,
        parameter_servers=parameter_servers,
        chief=chief,
        elastic=elastic,
        max_restarts=max_restarts,
        threads_per_worker=threads_per_worker,
        seed=seed,
        log_dir=log_dir,
        grace_seconds=grace_seconds,
        start_timeout_seconds=start_timeout_seconds,
    )
    resources = {"CPU": 1.0} if resources_per_worker is None else dict(resources_per_worker)
    check_placement(resources, placement_strategy)
    ray = import_ray()
    if not ray.is_initialized():
        ray.init()
    with _Actors(call, resources, placement_strategy) as actors:
        return run_rounds(call, actors.run_round)


class _Actors:
    """The actors of a call, in one placement group, which live for all its rounds: Ray restarts those that are lost."""

    def __init__(self, call: EngineCall, resources: Mapping[str, float], strategy: str) -> None:
        self._ray, self._resources = import_ray(), resources
        self._threads = max(1, int(resources.get("CPU", 1)))
        bundles = [dict(resources) for _ in range(call.spec.workers)]
        self._group = self._ray.util.placement_group(bundles, strategy=strategy, name=f"tfdist-{call.run}")
        self._actors: list[Any] = []
        self._output = OutputOfActors(self._actors)
        try:
            self._wait_for_resources(call)
            place = actor_class(call.spec.max_restarts, is_elastic=call.spec.elastic is not None)
            for rank in range(call.spec.workers):
                options = resource_options(self._group, rank, resources)
                self._actors.append(place.options(**options).remote(rank))
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "_Actors":
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the actors. The kernel then ends launchers that are still there, with SIGTERM."""
        for actor in self._actors:
            with contextlib.suppress(Exception):  # Ray may have been shut down
                self._ray.kill(actor)
        with contextlib.suppress(Exception):
            self._ray.util.remove_placement_group(self._group)

    def run_round(self, call: EngineCall) -> list[PlaceResult]:
        """Runs a round; returns how it ended in each place."""
        limit = call.spec.start_timeout_seconds
        asked = [actor.address.remote() for actor in self._actors]
        answers, missing = self._gather(asked, call, limit, f"did not start within {limit:g} s", is_start=True)
        if missing:
            raise LostPlaceError(", ".join(missing.values()))
        addresses = [answers[rank] for rank in range(len(asked))]
        tasks = [call.task(rank, addresses, threads=self._threads) for rank in range(call.spec.workers)]
        refs = [actor.run.remote(task) for actor, task in zip(self._actors, tasks, strict=True)]
        results, lost = self._gather(refs, call, None, "")
        if lost:
            raise LostPlaceError(", ".join(lost.values()), list(results.values()))
        return list(results.values())

    def _gather(
        self, refs: Sequence[Any], call: EngineCall, seconds: float | None, late: str, *, is_start: bool = False
    ) -> tuple[dict[int, Any], dict[int, str]]:
        """Returns the answers by rank, and why others are missing. Stops the round when one is lost or interrupted."""
        answers: dict[int, Any] = {}
        missing: dict[int, str] = {}
        pending = {ref: rank for rank, ref in enumerate(refs)}
        deadline = None if seconds is None else time.monotonic() + seconds
        is_stopped, round_end = False, RoundEnd(call)
        trains_on, limit, began = (
            not is_start and call.spec.elastic is not None,
            call.spec.start_timeout_seconds,
            time.monotonic(),
        )
        try:
            while pending:
                ready = self._ray.wait(list(pending), num_returns=1, timeout=_LOOK_SECONDS)[0]
                if not is_start:
                    self._output.show_new()
                for ref in ready:
                    rank = pending.pop(ref)
                    try:
                        answers[rank] = self._ray.get(ref)
                    except self._ray.exceptions.RayError as error:
                        missing[rank] = explain_lost_actor(rank, error)
                if trains_on and pending and self._output.silent_seconds(pending.values(), since=began) >= limit:
                    deadline, late = time.monotonic(), f"was not started again within {limit:g} s"
                ends = (bool(missing) and not trains_on) or (not is_start and round_end.has_come(answers.values()))
                if ends and not is_stopped:
                    is_stopped, late = True, "did not end in time"
                    self._stop(call, pending.values())
                    deadline = time.monotonic() + call.spec.grace_seconds + STOP_SECONDS
                if deadline is not None and time.monotonic() >= deadline:
                    missing |= {rank: f"place {rank} {late}" for rank in pending.values()}
                    break
        except BaseException:
            if not is_start:  # the workers save and leave after an interrupt
                self._stop(call, pending.values())
                if pending:
                    seconds = call.spec.grace_seconds + STOP_SECONDS
                    self._ray.wait(list(pending), num_returns=len(pending), timeout=seconds)
            raise
        if not is_start:
            self._output.show_new(is_last=True)
        return answers, missing

    def _stop(self, call: EngineCall, ranks: Any) -> None:
        for rank in ranks:
            self._actors[rank].stop.remote(call.run)

    def _wait_for_resources(self, call: EngineCall) -> None:
        deadline = time.monotonic() + call.spec.start_timeout_seconds
        while not self._group.wait(_LOOK_SECONDS):
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"Ray has not had the resources of all workers at the same time. Received: "
                    f"{describe_resources(self._ray)} after {call.spec.start_timeout_seconds:g} s. Expected: workers="
                    f"{call.spec.workers}, each with {dict(self._resources)}. Start more nodes, wait for other "
                    "programs, ask for less in `resources_per_worker`, or give more `start_timeout_seconds`."
                )


def import_ray() -> Any:
    """Returns the module `ray`, or raises an ImportError that says how to install it."""
    return import_optional(
        "ray",
        "Ray is not installed. Received: no module `ray`. Expected: the extra `ray`. Run: pip install 'tfdist[ray]'",
    )


def check_placement(resources: Any, strategy: Any) -> None:
    """Checks `resources_per_worker` and `placement_strategy`."""
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
    """Returns the resources of the cluster, and those that are free."""

    def chosen(resources: Mapping[str, float]) -> dict[str, float]:
        return {name: value for name, value in resources.items() if ":" not in name}

    return f"a cluster with {chosen(ray.cluster_resources())}, of which {chosen(ray.available_resources())} are free"


def resource_options(group: Any, rank: int, resources: Mapping[str, float]) -> dict[str, Any]:
    """Returns the options of the actor of a place."""
    strategy = import_ray().util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=rank, placement_group_capture_child_tasks=False
    )
    custom_resources = {name: value for name, value in resources.items() if name not in ("CPU", "GPU", "memory")}
    memory = {"memory": resources["memory"]} if "memory" in resources else {}
    return {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "resources": custom_resources or None,
        "scheduling_strategy": strategy,
        **memory,
    }


def explain_lost_actor(rank: int, error: Exception) -> str:
    """Returns a clause for a lost place; raises an error that is not a loss."""
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
    """Shows the output of places in the driver. Ray itself leaves out lines that several actors print."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = actors
        self._asked: dict[Any, Any] = {}  # by actor: the answer that is under way
        self._heard_at: dict[Any, float] = {}  # by actor: when it has answered last

    def show_new(self, *, is_last: bool = False) -> None:
        """Prints the lines that have come since the last call. With `is_last` it waits for the rest."""
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
                        self._heard_at[actor] = time.monotonic()

    def silent_seconds(self, ranks: Iterable[int], *, since: float) -> float:
        """Returns for how long none of these actors has answered: Ray has not started those again that are lost."""
        return time.monotonic() - max([since, *(self._heard_at.get(self._actors[rank], since) for rank in ranks)])


def actor_class(max_restarts: int, *, is_elastic: bool) -> Any:
    """Returns the class of the actors, each of which Ray restarts at most `max_restarts` times.

    With `is_elastic` it does so without a limit, and runs the place again.
    """
    ray = import_ray()
    retries = -1 if is_elastic else 0

    class Place(_Place):
        address = ray.method(max_task_retries=-1)(_Place.address)  # also of an actor that is being restarted

        @ray.method(max_task_retries=retries)
        def run(self, task: PlaceTask) -> PlaceResult:
            return super().run(task)

        @ray.method(max_task_retries=retries)
        def stop(self, run: str) -> None:
            super().stop(run)

    Place.__name__ = Place.__qualname__ = "TfdistPlace"
    restarts = -1 if is_elastic else max_restarts
    return ray.remote(max_concurrency=_CALLS_AT_ONCE, max_restarts=restarts, max_task_retries=0)(Place)


class _Place:
    """A place as an actor of Ray."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._is_again = True  # whether this process replaces a lost one, so that nobody has asked for its address

    def __repr__(self) -> str:
        return f"tfdist place {self._rank}"

    def address(self) -> PlaceAddress:
        self._is_again = False
        return place_address(import_ray().util.get_node_ip_address())

    def run(self, task: PlaceTask) -> PlaceResult:
        host = import_ray().util.get_node_ip_address()
        if self._is_again and host != task.host:
            text = (
                f"place {task.rank} was lost on {task.host} and is now on {host}, but workers keep their addresses: "
                "the others train on without it"
            )
            self._lines.append(f"tfdist: {text}")
            return PlaceResult(task.rank, LOST_RUN_EXIT_CODE, {}, None, (text,), is_absent=True)
        return run_place(task, show=self._lines.append, is_killed=True, is_again=self._is_again)

    def lines(self) -> list[str]:
        return [self._lines.popleft() for _ in range(len(self._lines))]

    def stop(self, run: str) -> None:
        stop_places(run)
