"""on_dask: calls a function in new processes beside the workers of a Dask cluster."""

import concurrent.futures
import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

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
from tfdist.launch.function_call.worker_results import WorkerError
from tfdist.launch.run_spec import START_TIMEOUT_SECONDS
from tfdist.utils.optional_modules import import_optional

PLACE_KEY = "tfdist-place"
ANSWER_SECONDS = 30.0
Value = TypeVar("Value")
_POLL_SECONDS, _LOOK_SECONDS = 0.1, 1.0


def import_distributed() -> Any:
    """Returns the module `distributed`, or raises an ImportError that says how to install it."""
    return import_optional(
        "distributed",
        "Dask is not installed. Received: no module `distributed`. Expected: the extra `dask`. Run: pip install "
        "'tfdist[dask]'",
    )


@contextlib.contextmanager
def client_in_use(client: Any) -> Iterator[Any]:
    """Yields a client after checks, or the current one. In a task of Dask, secedes from the threads of its worker."""
    distributed = import_distributed()
    with contextlib.ExitStack() as stack:
        try:
            distributed.get_worker()
        except ValueError:
            pass
        else:
            stack.enter_context(distributed.worker_client())
        try:
            client = distributed.get_client() if client is None else client
        except ValueError:
            raise ValueError(
                "There is no Dask client. Received: client=None, and no current client. Expected: a "
                "`distributed.Client`. Create one: client = Client(scheduler_address)."
            ) from None
        if not isinstance(client, distributed.Client):
            raise TypeError(
                f"`client` is not a Dask client. Received: client={client!r}. Expected: a `distributed.Client`. "
                "Give Client(scheduler_address) or Client(cluster)."
            )
        if client.asynchronous:
            raise ValueError(
                "`on_dask` cannot use an asynchronous client. Received: a client with asynchronous=True. Expected: a "
                "synchronous one. Create Client(client.scheduler.address), and call `on_dask` in a thread."
            )
        yield client


class ReplacedWorkerError(Exception):
    """The Dask worker of a place has been replaced; the argument was its process."""


class DaskWorker(NamedTuple):
    """A Dask worker, as it describes itself."""

    address: PlaceAddress  # the address of its place
    threads: int
    is_free: bool  # whether it has a free thread, the resources that a place needs, and no place


def describe_worker(resources: Mapping[str, float], dask_worker: Any) -> DaskWorker:
    """Describes the Dask worker that this runs in, beside its tasks. `Client.run` sets `dask_worker`."""
    state = dask_worker.state
    has_place = any(str(key).startswith(PLACE_KEY) for key in state.tasks)
    has_resources = all(state.available_resources.get(name, 0) >= need for name, need in resources.items())
    has_thread = dask_worker.status.name == "running" and state.executing_count < state.nthreads
    host = import_distributed().comm.get_address_host(dask_worker.address)
    return DaskWorker(place_address(host), state.nthreads, has_thread and has_resources and not has_place)


def names_of_workers(client: Any) -> set[str]:
    """Returns the addresses of all workers that Dask has now."""
    try:
        return set(client.sync(client.scheduler.identity, callback_timeout=ANSWER_SECONDS)["workers"])
    except OSError as error:
        raise ConnectionError(
            f"The scheduler of Dask does not answer. Received: {error!r} from {client!r}. Expected: a scheduler that "
            "runs until the function returns. Start it again, and create another client."
        ) from error


def run_beside_tasks(
    client: Any,
    names: Collection[str],
    function: Callable[..., Any],
    *args: Any,
    seconds: float = ANSWER_SECONDS,
) -> dict[str, Any]:
    """Calls a function in Dask workers, whether or not their threads are busy.

    Returns the value of each worker that has not been lost meanwhile.
    """
    try:
        answers = client.run(function, *args, workers=list(names), on_error="return", callback_timeout=seconds)
    except TimeoutError:
        raise TimeoutError(
            f"A Dask worker does not answer. Received: no answer of at least one of {len(names)} for "
            f"{seconds:g} s. Expected: workers whose event loop runs. Look for tasks that hold Python's "
            "lock, or restart the worker."
        ) from None
    for name, answer in answers.items():
        if isinstance(answer, ImportError):
            raise ImportError(
                f"A Dask worker cannot import tfdist. Received: {answer} in {name}. Expected: tfdist and "
                "TensorFlow on all workers, in the versions of this process. Install them there."
            ) from answer
        if isinstance(answer, Exception) and not isinstance(answer, OSError):
            raise answer
    return {name: answer for name, answer in answers.items() if not isinstance(answer, OSError)}


def run_task(task: PlaceTask, pid: int, *, is_again: bool = False) -> PlaceResult:
    """Runs a place as a task of Dask. `pid` is the process of the Dask worker that was asked.

    Raises a ReplacedWorkerError if another process has taken over the address of the Dask worker, as after a restart.
    """
    if os.getpid() != pid:
        raise ReplacedWorkerError(pid)
    worker = import_distributed().get_worker()

    topic = _topic(task.run)
    return run_place(
        task,
        show=lambda line: worker.log_event(topic, line),
        should_stop=task_has_ended(),
        is_leaving=lambda: _is_closing(worker),
        is_killed=True,
        is_again=is_again,
    )


def _is_closing(worker: Any) -> bool:
    return worker.status.name in ("closing", "closed", "failed")


@contextlib.contextmanager
def shown_output(client: Any, call: EngineCall) -> Iterator[None]:
    """Prints the output of the places of a call.

    It does not use `distributed.print`, which all clients show: a worker of the training that is a client would send
    the line again.
    """
    client.subscribe_topic(_topic(call.run), lambda event: print(event[1], flush=True))
    try:
        yield
    finally:
        client.unsubscribe_topic(_topic(call.run))


def _topic(run: str) -> str:
    return f"{PLACE_KEY}-{run.partition('-')[0]}"  # the same in all rounds


def task_has_ended() -> Callable[[], bool]:
    """Returns a function that says whether the task of this thread was cancelled, or its Dask worker closes.

    Dask cannot end the thread of a task: a task whose result no client wants any more is "cancelled" until it returns.
    Outside of tasks the function returns False.
    """
    distributed = import_distributed()
    try:
        worker, key = distributed.get_worker(), distributed.worker.thread_state.key
    except (ValueError, AttributeError):
        return lambda: False

    def has_ended() -> bool:
        task = worker.state.tasks.get(key)
        return task is None or task.state == "cancelled" or _is_closing(worker)

    return has_ended


def on_dask(
    function: Callable[..., Value],
    *args: Any,
    client: Any = None,
    workers: int,
    parameter_servers: int = 0,
    chief: bool = False,
    elastic: int | None = None,
    max_restarts: int = 0,
    resources: Mapping[str, float] | None = None,
    threads_per_worker: int | None = None,
    seed: int | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    grace_seconds: float = 5.0,
    start_timeout_seconds: float = START_TIMEOUT_SECONDS,
) -> list[Value]:
    """Calls a function in new processes, each beside another Dask worker, and returns its values, by rank.

    It does on the hosts of Dask what `from_notebook` does on this one. It takes Dask workers that have a free thread,
    which it occupies, and no process of another such call. In a task of Dask it secedes from the worker's threads.

    The loss of a Dask worker ends the run; with `max_restarts` the function is called again beside those that there are
    then, and with `FailureRecovery` the training resumes. An interrupt, or the end of the client, ends the processes
    with SIGTERM, so that `FailureRecovery` can save, and kills them after `grace_seconds`. With `elastic` the others
    train on without a Dask worker that is lost or closes, whose process is killed.

    >>> from tfdist.launch import on_dask
    >>> weights = on_dask(train, client, workers=4)  # doctest: +SKIP

    Args:
        function: Any callable that can be pickled with the objects it uses.
        *args: Positional arguments of the function, after the client, if that is not given by name.
        client: A `distributed.Client`. Defaults to the current one.
        workers: Number of workers.
        parameter_servers: Number of parameter servers. With any, a chief alone calls the function.
        chief: Whether a chief alone calls the function, for `ModelParallelStrategy`.
        elastic: The least number of workers that train: a worker that is lost is started again alone, while the others
            train on, as by `tfdist run --elastic`. So is the process of a lost Dask worker, beside a free one of the
            same host. None: the loss of one is a failure of all.
        max_restarts: How often to restart all workers after a failure, and to call the function again.
        resources: What each process takes of its Dask worker's resources, such as `{"GPU": 1}`.
        threads_per_worker: Threads of each worker. Defaults to those of its Dask worker.
        seed: Where the random generators of Python, NumPy and TensorFlow start in every worker, and after every
            restart, unless `function` seeds them. By default TFDIST_SEED of this process, else a new one for each call.
        log_dir: Directory for the workers' output on their hosts, in files `rank-<rank>.log`, in addition.
        grace_seconds: Seconds from SIGTERM to SIGKILL when workers are ended.
        start_timeout_seconds: How long to wait for free Dask workers, and then for the processes to start.

    Returns:
        The function's return value in each worker, by rank; with a chief, its one value. With `elastic` None for a
        worker that was lost, and has not joined the others before the end.

    Raises:
        TypeError: If `function` or `client` is not one, or something cannot be pickled.
        ValueError: If an option is invalid, or there is no client.
        TimeoutError: If there were not enough free Dask workers in time; it says how many there were.
        tfdist.launch.WorkerError: If a worker failed, with its rank and its traceback, or a Dask worker was lost.
        ImportError: If Dask is not installed (the extra `dask`), or tfdist is not on the hosts of Dask.
    """
    if client is None and args and isinstance(args[0], import_distributed().Client):
        client, args = args[0], args[1:]
    call = EngineCall.of(
        function,
        args,
        caller="on_dask",
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
    with client_in_use(client) as used, shown_output(used, call):
        return run_rounds(call, lambda call: _Round(used, call, dict(resources or {})).run())


class _Round:
    """The places of one round, by the address of their Dask worker, in order of rank."""

    def __init__(self, client: Any, call: EngineCall, resources: Mapping[str, float]) -> None:
        self._client, self._call, self._resources = client, call, resources
        self._futures: dict[str, Any] = {}
        self._addresses: list[PlaceAddress] = []
        self._restarts, self._end = 0, RoundEnd(call)
        self._lock = import_distributed().Lock(PLACE_KEY, scheduler_rpc=client.scheduler, loop=client.loop)
        self._has_ended = task_has_ended()

    def run(self) -> list[PlaceResult]:
        """Runs the places; returns how they ended. Raises LostPlaceError if Dask workers were lost."""
        try:
            self._start()
            while (running := self._running()) and not self._ends_early():
                if lost := [name for name in self._futures if name not in running and self._is_lost(name)]:
                    if self._call.spec.elastic is None:
                        break
                    self._start_again(lost, running)
                self._wait(_LOOK_SECONDS, until=lambda: not self._pending())
            self._stop()
            return self._results()
        finally:
            try:
                with contextlib.suppress(OSError):  # without a scheduler, Dask's workers close and end their places
                    self._stop()
            finally:
                self._client.cancel(list(self._futures.values()))

    def _start(self) -> None:
        """Occupies Dask workers. Calls take turns: otherwise each could hold a part of what another needs."""
        needed, seconds = self._call.spec.workers, self._call.spec.start_timeout_seconds
        deadline = time.monotonic() + seconds
        while True:
            names = names_of_workers(self._client)
            with self._lock:
                dask_workers = self._describe(names)
                free = sorted(name for name, worker in dask_workers.items() if worker.is_free)[:needed]
                if len(free) == needed:
                    return self._submit({name: dask_workers[name] for name in free})
            if time.monotonic() >= deadline:
                resources_text = f", {self._resources}" if self._resources else ""
                raise TimeoutError(
                    f"There are too few free Dask workers. Received: {len(dask_workers)} in the cluster, {len(free)} "
                    f"of them with a free thread{resources_text} and no process of another call, after {seconds:g} s. "
                    f"Expected: workers={needed}. Start more, by cluster.scale({needed}) or "
                    f"cluster.adapt(minimum={needed}), or give more `start_timeout_seconds`."
                )
            self._wait(_LOOK_SECONDS)

    def _submit(self, chosen: Mapping[str, DaskWorker]) -> None:
        self._addresses = [worker.address for worker in chosen.values()]
        for rank, (name, worker) in enumerate(chosen.items()):
            self._futures[name] = self._submit_place(rank, name, worker)
        self._wait_until_taken(chosen)

    def _submit_place(
        self, rank: int, name: str, worker: DaskWorker, *, suffix: str = "", is_again: bool = False
    ) -> Any:
        return self._client.submit(
            run_task,
            self._call.task(rank, self._addresses, threads=worker.threads),
            worker.address.pid,
            is_again=is_again,
            key=f"{PLACE_KEY}-{self._call.run}-{rank}{suffix}",
            workers=[name],
            resources=self._resources or None,
            pure=False,
        )

    def _wait_until_taken(self, names: Collection[str]) -> None:
        seconds = self._call.spec.start_timeout_seconds
        self._wait(seconds, until=lambda: not any(worker.is_free for worker in self._describe(names).values()))

    def _ends_early(self) -> bool:
        """Returns whether a place has failed, or ended so that the others have to be stopped."""
        has_failed = any(future.status == "error" and not self._is_lost(name) for name, future in self._futures.items())
        ended = [future for future in self._futures.values() if future.status == "finished"]
        return has_failed or self._end.has_come(future.result(timeout=ANSWER_SECONDS) for future in ended)

    def _is_lost(self, name: str) -> bool:
        """Returns whether a place does not run, and has not ended by itself."""
        future = self._futures[name]
        if future.status == "finished":
            return bool(future.result(timeout=ANSWER_SECONDS).is_lost)
        if future.status == "error":
            return isinstance(future.exception(timeout=ANSWER_SECONDS), ReplacedWorkerError)
        return True

    def _start_again(self, lost: Collection[str], running: Collection[str]) -> None:
        """Starts lost places beside other Dask workers of their hosts, if there are any: the others train on."""
        for old in lost:
            rank = list(self._futures).index(old)
            host = self._addresses[rank].host
            names = names_of_workers(self._client) - set(running)
            names = {name for name in names if import_distributed().comm.get_address_host(name) == host}
            with self._lock:
                try:
                    found = self._describe(names) if names else {}
                except (TimeoutError, ImportError):  # of one that does not belong to the call: asked again in a second
                    found = {}
                new = next(
                    (name for name in sorted(found) if found[name].is_free and found[name].address.host == host), ""
                )
                if not new:
                    continue
                self._client.cancel([self._futures[old]])
                self._restarts += 1
                future = self._submit_place(rank, new, found[new], suffix=f"-{self._restarts}", is_again=True)
                futures = self._futures.items()
                self._futures = {new if name == old else name: future if name == old else of for name, of in futures}
                self._wait_until_taken([new])
                running = {*running, new}

    def _stop(self) -> None:
        """Ends the places that have not ended, and waits for them."""
        deadline = time.monotonic() + self._call.spec.grace_seconds + STOP_SECONDS
        if running := self._running():
            with contextlib.suppress(TimeoutError):  # one of them is ending
                run_beside_tasks(self._client, running, stop_places, self._call.run, seconds=_LOOK_SECONDS)
        while self._running() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _running(self) -> set[str]:
        return self._pending() and self._pending() & names_of_workers(self._client)

    def _results(self) -> list[PlaceResult]:
        results, lost = [], []
        for rank, (name, future) in enumerate(self._futures.items()):
            try:
                # A task that is still pending after `_stop` has lost its Dask worker, or does not end.
                results.append(future.result(timeout=0.1 if name in self._pending() else ANSWER_SECONDS))
            except (TimeoutError, concurrent.futures.CancelledError, ReplacedWorkerError):
                lost.append(f"place {rank} was lost with Dask worker {name}")
            except Exception as error:
                raise WorkerError(f"Place {rank} failed in Dask worker {name}: {error!r}", rank=rank) from error
        if lost:
            raise LostPlaceError(", ".join(lost), results)
        return results

    def _wait(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not until():
            if self._has_ended():
                raise concurrent.futures.CancelledError("The task of Dask that has called `on_dask` was cancelled.")
            time.sleep(_POLL_SECONDS)

    def _pending(self) -> set[str]:
        return {name for name, future in self._futures.items() if future.status in ("pending", "lost")}

    def _describe(self, names: Collection[str]) -> dict[str, DaskWorker]:
        return run_beside_tasks(self._client, names, describe_worker, self._resources)
