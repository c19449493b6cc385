"""on_spark: calls a function in new processes beside the tasks of a barrier stage of Spark."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from tfdist.launch.engines.engine_call import EngineCall, LostPlaceError, PlaceAddress, PlaceResult, run_rounds
from tfdist.launch.engines.place import run_place
from tfdist.launch.function_call.worker_results import WorkerError
from tfdist.launch.run_spec import START_TIMEOUT_SECONDS
from tfdist.utils.optional_modules import import_optional

Value = TypeVar("Value")
_POLL_SECONDS = 0.2
# Spark ends the Python process of a cancelled task within 4 s, or its killTimeout; the executor then reports it.
_STOP_SECONDS = 20.0
_REMEDY = (
    "Start more executors (spark.executor.instances, spark.executor.cores divided by spark.task.cpus), wait for other "
    "jobs, or give more `start_timeout_seconds`."
)
_ERROR_LINES = 12


def on_spark(
    function: Callable[..., Value],
    *args: Any,
    spark: Any = None,
    workers: int,
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
    """Calls a function in new processes on the executors of Spark, and returns its values, by rank.

    It does on the hosts of Spark what `from_notebook` does on this one. One barrier stage has a task for each worker,
    so Spark starts all of them at the same time, or none. A task occupies its slot until the function returns.

    The loss of an executor ends the stage; with `max_restarts` the function is called again in another one, and with
    `FailureRecovery` the training resumes. An interrupt, or the end of the driver, ends the processes with SIGTERM, so
    that `FailureRecovery` can save, and kills them after `grace_seconds`.

    >>> from tfdist.launch import on_spark
    >>> weights = on_spark(train, workers=4)  # doctest: +SKIP

    Args:
        function: Any callable that can be pickled with the objects it uses.
        *args: Positional arguments of the function.
        spark: A `pyspark.sql.SparkSession`. Defaults to the active one.
        workers: Number of workers.
        parameter_servers: Number of parameter servers. With any, a chief alone calls the function.
        chief: Whether a chief alone calls the function, for `ModelParallelStrategy`.
        elastic: The least number of workers that train: a worker that is lost is started again alone, while the others
            train on, as by `tfdist run --elastic`. The loss of an executor ends the stage also then. None: the loss
            of one is a failure of all.
        max_restarts: How often to restart all workers after a failure, and to call the function again.
        threads_per_worker: Threads of each worker. Defaults to `spark.task.cpus`.
        seed: Where the random generators of Python, NumPy and TensorFlow start in every worker, and after every
            restart, unless `function` seeds them. By default TFDIST_SEED of this process, else a new one for each call.
        log_dir: Directory for the workers' output on their hosts, in files `rank-<rank>.log`, in addition.
        grace_seconds: Seconds from SIGTERM to SIGKILL when workers are ended.
        start_timeout_seconds: How long to wait for free slots, and then for the processes to start.

    Returns:
        The function's return value in each worker, by rank; with a chief, its one value. With `elastic` None for a
        worker that was lost, and has not joined the others before the end.

    Raises:
        TypeError: If `function` or `spark` is not one, or something cannot be pickled.
        ValueError: If an option is invalid, there is no session, or Spark runs no barrier stages in it.
        TimeoutError: If there were not enough free slots in time; it says how many there were.
        tfdist.launch.WorkerError: If a worker failed, with its rank and its traceback, or an executor was lost.
        ImportError: If Spark is not installed (the extra `spark`), or tfdist is not on the hosts of Spark.
    """
    call = EngineCall.of(
        function,
        args,
        caller="on_spark",
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
    context = context_of(spark)
    return run_rounds(call, lambda call: _Round(context, call).run())


class _Round:
    """The places of one round: the tasks of a job, which a thread waits for."""

    def __init__(self, context: Any, call: EngineCall) -> None:
        self._context, self._call = context, call
        self._group = f"tfdist-{call.run}"
        self._tracker = context.statusTracker()
        self._results: list[PlaceResult] = []
        self._error: Exception | None = None
        self._limit = time.monotonic() + call.spec.start_timeout_seconds

    def run(self) -> list[PlaceResult]:
        """Runs the places; returns how they ended."""
        self._wait_for_slots()
        thread = import_pyspark().InheritableThread(target=self._collect)
        thread.daemon = True
        thread.start()
        try:
            self._follow(thread)
        finally:
            self._stop(thread)
        if self._error is not None:
            raise WorkerError(f"Spark has ended the job of the workers: {_first_lines(self._error)}") from self._error
        return self._results

    def _collect(self) -> None:
        workers = self._call.spec.workers
        try:
            # After an interrupt of Java's threads Spark would leave the Python process as it is.
            self._context.setJobGroup(self._group, f"on_spark: {workers} workers", interruptOnCancel=False)
            tasks = self._context.parallelize(range(workers), workers).barrier()
            self._results = tasks.mapPartitions(run_barrier_task(self._call)).collect()
        except Exception as error:
            self._error = error

    def _wait_for_slots(self) -> None:
        needed = self._call.spec.workers
        while (slots := slots_of(self._context)) < needed:
            if is_in_driver(self._context) or time.monotonic() >= self._limit:
                raise TimeoutError(
                    f"There are too few slots for tasks. Received: {slots}, of {self._context.master}, after "
                    f"{0 if is_in_driver(self._context) else self._call.spec.start_timeout_seconds:g} s. Expected: "
                    f"workers={needed}, all at the same time. {_REMEDY}"
                )
            time.sleep(_POLL_SECONDS)

    def _follow(self, thread: threading.Thread) -> None:
        """Waits for the end of the job, as long as no task fails: Spark would start the stage again by itself."""
        has_started, is_alive = False, True
        while is_alive:
            thread.join(_POLL_SECONDS)
            is_alive = thread.is_alive()
            if self._error is not None:
                time.sleep(_POLL_SECONDS)  # Spark counts failed tasks a moment later
            stage = self._stage()
            if stage is not None and (stage.numFailedTasks or stage.currentAttemptId):
                raise self._failure(stage.stageId)
            has_started = has_started or (stage is not None and stage.numActiveTasks + stage.numCompletedTasks > 0)
            if not has_started and is_alive and time.monotonic() >= self._limit:
                raise TimeoutError(
                    f"There are too few free slots for tasks. Received: {slots_of(self._context)} slots of "
                    f"{self._context.master}, of which other jobs use some, after "
                    f"{self._call.spec.start_timeout_seconds:g} s. Expected: workers={self._call.spec.workers}, all "
                    f"free at the same time. {_REMEDY}"
                )

    def _failure(self, stage: int) -> Exception:
        """Returns what a failed task means: tasks end without an error whatever the function does."""
        error = (errors_of_stage(self._context, stage) or ["a task has failed"])[0]
        if "No module named 'tfdist" in error or "No module named 'cloudpickle" in error:
            return ImportError(
                f"An executor of Spark cannot import tfdist. Received: {_first_lines(error)}. Expected: tfdist and "
                "TensorFlow on all executors, in the versions of the driver. Install them there, set PYSPARK_PYTHON to "
                "a Python that has them, or give an environment by spark.archives."
            )
        if "Traceback (most recent call last)" in error:
            return WorkerError(f"A place failed in a task of Spark: {error}")
        return LostPlaceError(" ".join(["a place was lost:", _first_lines(error)]))

    def _stop(self, thread: threading.Thread) -> None:
        """Cancels the job if it has not ended, and waits for its tasks."""
        deadline = time.monotonic() + _STOP_SECONDS
        if thread.is_alive():
            self._context.cancelJobGroup(self._group)
            thread.join(_STOP_SECONDS)
        while (stage := self._stage()) is not None and stage.numActiveTasks and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _stage(self) -> Any:
        """Returns the `SparkStageInfo` of the job, or None if there is none yet."""
        jobs = self._tracker.getJobIdsForGroup(self._group)
        job = self._tracker.getJobInfo(jobs[0]) if jobs else None
        return None if job is None else self._tracker.getStageInfo(job.stageIds[0])


def _first_lines(error: object) -> str:
    return " ".join(line.strip() for line in str(error).splitlines()[:3])


def import_pyspark() -> Any:
    """Returns the module `pyspark`, or raises an ImportError that says how to install it."""
    message = (
        "Spark is not installed. Received: no module `pyspark`. Expected: the extra `spark`, and Java. "
        "Run: pip install 'tfdist[spark]'"
    )
    import_optional("pyspark.sql", message)
    return import_optional("pyspark", message)


def context_of(spark: Any) -> Any:
    """Returns the `SparkContext` of a session, by default the active one, after checks."""
    session = import_pyspark().sql.SparkSession
    if spark is None:
        try:
            spark = session.active()
        except Exception as error:  # PySparkRuntimeError, and Py4J's errors of a stopped session
            raise ValueError(
                "There is no Spark session. Received: spark=None, and no active session. Expected: a `SparkSession`. "
                "Create one: spark = SparkSession.builder.getOrCreate()."
            ) from error
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise ValueError(
            "`on_spark` cannot use Spark Connect. Received: a session of `SparkSession.builder.remote`, which has no "
            "barrier stages of RDDs. Expected: a session of the driver itself. Start the program by spark-submit, or "
            "create the session with SparkSession.builder.master(...)."
        )
    if not isinstance(spark, session):
        raise TypeError(
            f"`spark` is not a Spark session. Received: spark={spark!r}. Expected: a `pyspark.sql.SparkSession`. Give "
            "the session that your DataFrames are of."
        )
    context = spark.sparkContext
    is_dynamic = context.getConf().get("spark.dynamicAllocation.enabled", "false").lower() == "true"
    if is_dynamic and not is_in_driver(context):
        raise ValueError(
            "Spark runs no barrier stage while it adds and removes executors by itself. Received: "
            "spark.dynamicAllocation.enabled=true. Expected: false, and a fixed number of executors. Create the "
            "session with .config('spark.dynamicAllocation.enabled', 'false') and spark.executor.instances."
        )
    return context


def is_in_driver(context: Any) -> bool:
    """Says whether tasks run in the driver's process: master `local` or `local[n]`."""
    return context.master == "local" or context.master.startswith("local[")


def slots_of(context: Any) -> int:
    """Returns how many tasks the executors that there are can run at the same time."""
    scala = context._jsc.sc()
    return int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))


def errors_of_stage(context: Any, stage: int) -> list[str]:
    """Returns the errors of the tasks of a stage that have failed, without Java's lines; no more than a few."""
    store, errors = context._jsc.sc().statusStore(), []
    for attempt in range(store.lastStageAttempt(stage).attemptId() + 1):
        tasks = store.taskList(stage, attempt, 1000)
        for index in range(tasks.size()):
            if (error := tasks.apply(index).errorMessage()).isDefined():
                lines = [line for line in error.get().splitlines() if line.strip() and not line.startswith("\tat ")]
                errors.append("\n".join(lines[-_ERROR_LINES:]))
    # A failed task makes Spark kill the others, which then say less.
    return sorted(dict.fromkeys(errors), key=lambda text: "barrier" in text)


def run_barrier_task(call: EngineCall) -> Callable[[Iterable[Any]], Iterator[PlaceResult]]:
    """Returns the function of a task: it learns the addresses of all places and runs its own."""

    def show(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def run(_: Iterable[Any]) -> Iterator[PlaceResult]:
        context = import_pyspark().BarrierTaskContext.get()
        rank = context.partitionId()
        # `allGather` would ask only once a second whether the others have answered.
        hosts = [info.address.rpartition(":")[0].strip("[]") for info in context.getTaskInfos()]
        addresses = [PlaceAddress(host, call.likely_port) for host in hosts]
        task = call.task(rank, addresses, threads=context.cpus())
        gpus = context.resources().get("gpu")
        environ = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus.addresses)}
        parent = os.getppid()
        # Without PySpark's daemon nothing ends this process when the executor is killed.
        yield run_place(task, show=show, should_stop=lambda: os.getppid() != parent, environ=environ)

    return run
