"""Spark for `on_spark`: the session, its slots, what failed in a stage, and a place as a task of a barrier stage."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tfdist.launch.engines.engine_call import EngineCall, PlaceAddress
from tfdist.launch.engines.place import PlaceResult, run_place

_ERROR_LINES = 12


def import_pyspark() -> Any:
    """Returns the module `pyspark`.

    Raises:
        ImportError: If it is not installed. The message says how to install it.
    """
    try:
        import pyspark.sql
    except ImportError as error:
        raise ImportError(
            "Spark is not installed. Received: no module `pyspark`. Expected: the extra `spark`, and Java. "
            "Run: pip install 'tfdist[spark]'"
        ) from error
    return pyspark


def context_of(spark: Any) -> Any:
    """Returns the `SparkContext` of a session after checks.

    Args:
        spark: A `pyspark.sql.SparkSession`, or None for the active one.

    Raises:
        ImportError: If Spark is not installed.
        TypeError: If `spark` is something else.
        ValueError: If there is no session, or Spark cannot run barrier stages in it.
    """
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
    """Returns the function of a task: it learns the addresses of all places and runs its own.

    Args:
        call: What to call.
    """

    def run(_: Iterable[Any]) -> Iterator[PlaceResult]:
        context = import_pyspark().BarrierTaskContext.get()
        rank = context.partitionId()
        # Not by `allGather`, which asks once a second whether the others have answered.
        hosts = [info.address.rpartition(":")[0].strip("[]") for info in context.getTaskInfos()]
        addresses = [PlaceAddress(host, call.likely_port) for host in hosts]
        task = call.task(rank, addresses, threads=context.cpus())
        gpus = context.resources().get("gpu")
        environ = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus.addresses)}
        parent = os.getppid()
        # Without PySpark's daemon nothing ends this process when the executor is killed.
        yield run_place(task, show=_show, should_stop=lambda: os.getppid() != parent, environ=environ)

    return run


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
