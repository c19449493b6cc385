"""Dask for `on_dask`: the client, the workers, and a place as a task."""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from tfdist.launch.engines.engine_call import EngineCall, PlaceAddress, PlaceTask
from tfdist.launch.engines.place import PlaceResult, place_address, run_place

PLACE_KEY = "tfdist-place"
ANSWER_SECONDS = 30.0


def import_distributed() -> Any:
    """Returns the module `distributed`.

    Raises:
        ImportError: If it is not installed. The message says how to install it.
    """
    try:
        import distributed
    except ImportError as error:
        raise ImportError(
            "Dask is not installed. Received: no module `distributed`. Expected: the extra `dask`. "
            "Run: pip install 'tfdist[dask]'"
        ) from error
    return distributed


@contextlib.contextmanager
def client_in_use(client: Any) -> Iterator[Any]:
    """Yields a client after checks, or the current one. In a task of Dask, secedes from the threads of its worker.

    Args:
        client: A `distributed.Client`, or None.

    Raises:
        TypeError: If `client` is something else.
        ValueError: If it is asynchronous, or there is none.
        ImportError: If Dask is not installed.
    """
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
    """A Dask worker, as it describes itself.

    Args:
        address: Where its place is.
        threads: Its threads.
        is_free: Whether it has a free thread, the resources that a place needs, and no place.
    """

    address: PlaceAddress
    threads: int
    is_free: bool


def describe_worker(resources: Mapping[str, float], dask_worker: Any) -> DaskWorker:
    """Describes the Dask worker that this runs in, beside its tasks.

    Args:
        resources: What a place needs of Dask's resources.
        dask_worker: Set by `Client.run`.
    """
    state = dask_worker.state
    has_place = any(str(key).startswith(PLACE_KEY) for key in state.tasks)
    has_resources = all(state.available_resources.get(name, 0) >= need for name, need in resources.items())
    has_thread = dask_worker.status.name == "running" and state.executing_count < state.nthreads
    host = import_distributed().comm.get_address_host(dask_worker.address)
    return DaskWorker(place_address(host), state.nthreads, has_thread and has_resources and not has_place)


def names_of_workers(client: Any) -> set[str]:
    """Returns the addresses of all workers that Dask has now.

    Raises:
        ConnectionError: If Dask's scheduler does not answer.
    """
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

    Args:
        client: The client.
        names: The workers' addresses.
        function: What to call.
        *args: Its arguments.
        seconds: How long to wait for all answers.

    Returns:
        The value of each worker that has not been lost meanwhile.

    Raises:
        ImportError: If the function's module cannot be imported there.
        TimeoutError: If a worker does not answer.
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


def run_task(task: PlaceTask, pid: int) -> PlaceResult:
    """Runs a place as a task of Dask.

    Args:
        task: What the place does.
        pid: The process of the Dask worker that was asked.

    Raises:
        ReplacedWorkerError: If another process has taken over the address of the Dask worker, as after a restart.
    """
    if os.getpid() != pid:
        raise ReplacedWorkerError(pid)
    worker = import_distributed().get_worker()

    topic = _topic(task.run)
    return run_place(task, show=lambda line: worker.log_event(topic, line), should_stop=task_has_ended())


@contextlib.contextmanager
def shown_output(client: Any, call: EngineCall) -> Iterator[None]:
    """Prints the output of the places of a call.

    Not by `distributed.print`, which all clients show: a worker of the training can be one, and would send it again.

    Args:
        client: The client.
        call: The call.
    """
    client.subscribe_topic(_topic(call.run), lambda event: print(event[1], flush=True))
    try:
        yield
    finally:
        client.unsubscribe_topic(_topic(call.run))


def _topic(run: str) -> str:
    return f"{PLACE_KEY}-{run.partition('-')[0]}"  # the same in all rounds


def ends_early(futures: Mapping[str, Any]) -> bool:
    """Returns whether a place has failed, or ended so that the others have to be stopped.

    Args:
        futures: Of the places' tasks.
    """
    return any(
        future.status == "error" or (future.status == "finished" and future.result(timeout=ANSWER_SECONDS).ends_round)
        for future in futures.values()
    )


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
        return task is None or task.state == "cancelled" or worker.status.name in ("closing", "closed", "failed")

    return has_ended
