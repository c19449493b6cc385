"""What a strategy reads from the environment: the cluster, how long other tasks may take to start or may be silent."""

import math
import os
from typing import Any

import tensorflow as tf

from tfdist import cluster
from tfdist.cluster.heartbeat import Heartbeat
from tfdist.utils.argument_checks import optional_integer_variable

_DEFAULT_START_TIMEOUT_SECONDS = 300.0
# How long a worker may be silent. `tfdist run` finds lost workers itself, and much earlier.
_SILENCE_UNDER_LAUNCHER_SECONDS = 3600.0
_SILENCE_SECONDS = 60.0
_SILENCE_VARIABLE = "TFDIST_SILENCE_LIMIT"
_SERVER_JOBS = {"chief", "worker", "ps", "evaluator"}
_VARIABLE = "TFDIST_START_TIMEOUT"
_ELASTIC_VARIABLE = "TFDIST_ELASTIC"
_BEGINNING_VARIABLE = "TFDIST_ELASTIC_WORKERS"
_RUN_VARIABLE = "TFDIST_RUN_ID"  # set by `tfdist run`, in whose clusters only a chief's workers have a job beside them


def resolver_of(config: cluster.ClusterConfig, **options: Any) -> Any:
    """Returns TensorFlow's cluster resolver for a task; `options` are further arguments of its constructor."""
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({job: list(addresses) for job, addresses in config.cluster.jobs.items()}),
        task_type=config.task.type,
        task_id=config.task.index,
        rpc_layer="grpc",
        **options,
    )


def worker_resolver() -> Any:
    """Returns the cluster resolver that the environment describes, with the GPUs of this process.

    Without a cluster in the environment its cluster is empty.
    """
    config = cluster.detect()
    if config is None:
        return tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
    return resolver_of(config, num_accelerators={"GPU": _num_logical_gpus()})


def is_started_by_launcher() -> bool:
    """Whether `tfdist run` has started this process: then a chief's workers do not run the script."""
    return _RUN_VARIABLE in os.environ


def check_workers_run_the_script(spec: dict[str, Any]) -> None:
    """Checks that `tfdist run` has started workers that train, and not TensorFlow's server for a chief.

    Raises:
        ValueError: They would never connect to the chief.
    """
    if "chief" in spec and is_started_by_launcher():
        option = "--parameter-servers" if "ps" in spec else "--chief"
        fitting = "ParameterServerStrategy" if "ps" in spec else "ModelParallelStrategy"
        raise ValueError(
            "The workers of this run do not run the script: they are servers of a chief. Received: a cluster of "
            f"{ {job: len(tasks) for job, tasks in sorted(spec.items())} }, the number of tasks of each job, from "
            f"tfdist run {option}. Expected: workers alone. Start the script by tfdist run --workers N script.py, "
            f"without {option}, or create a {fitting}."
        )


def check_parameter_server_cluster(spec: dict[str, Any], task_type: str | None, task_id: int | None) -> None:
    """Checks the jobs of a cluster with parameter servers, and the place of this process in it.

    A process without a task type is the chief.

    Raises:
        ValueError: The cluster has several chiefs, an unknown job, no worker or no server, or not this task.
    """
    sizes = {job: len(tasks) for job, tasks in sorted(spec.items())}
    remedy = "Change the `cluster_resolver` of ParameterServerStrategy, or TF_CONFIG."
    if sizes.get("chief", 0) > 1 or not sizes.get("worker") or not sizes.get("ps") or set(sizes) - _SERVER_JOBS:
        raise ValueError(
            f"Invalid cluster for parameter servers. Received: {sizes}, the number of tasks of each job. Expected: at "
            f"most one chief, at least one worker and one ps, and no other job than an evaluator. {remedy}"
        )
    tasks = {(job, number) for job, size in sizes.items() for number in range(size)} - {("evaluator", 0)}
    if task_type and (task_type, task_id or 0) not in tasks:
        raise ValueError(
            f"This process is not a task of its cluster with parameter servers. Received: task type {task_type!r}, "
            f"index {task_id}, and the tasks {sizes}. Expected: a chief, worker or ps below these numbers. {remedy}"
        )


def peer_addresses(spec: dict[str, list[str]], resolver: Any) -> dict[str, str]:
    """Returns the addresses of the other tasks that train, by name (`worker 1`)."""
    own_task = (resolver.task_type, resolver.task_id)
    return {
        f"{job} {index}": address
        for job, addresses in spec.items()
        for index, address in enumerate(addresses)
        if (job, index) != own_task and job in ("chief", "worker")
    }


def start_timeout_of(start_timeout_seconds: float | None) -> float:
    """Returns how many seconds the other tasks may take to start.

    Args:
        start_timeout_seconds: The argument of the strategy. If None, the environment variable `TFDIST_START_TIMEOUT`
            applies, which `tfdist run --start-timeout` sets, else 300 s.

    Raises:
        ValueError: The argument or the variable is not a positive, finite number.
    """
    if start_timeout_seconds is not None:
        if not _is_duration(start_timeout_seconds):
            raise ValueError(
                f"Invalid `start_timeout_seconds`. Received: {start_timeout_seconds!r}. Expected: a positive, finite "
                f"number of seconds, or None for the environment variable {_VARIABLE}."
            )
        return float(start_timeout_seconds)
    value = os.environ.get(_VARIABLE, "").strip()
    if not value:
        return _DEFAULT_START_TIMEOUT_SECONDS
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not _is_duration(seconds):
        raise ValueError(
            f"Invalid environment variable {_VARIABLE}. Received: {_VARIABLE}={value!r}. "
            "Expected: a positive, finite number of seconds. Start the workers by `tfdist run --start-timeout`, which "
            "sets it, or unset it."
        )
    return seconds


def is_elastic_run(elastic: bool | None) -> bool:
    """Returns whether the others train on when a worker is lost.

    Args:
        elastic: The argument of the strategy. If None, the environment variable `TFDIST_ELASTIC` applies, which
            `tfdist run --elastic` sets, else False.

    Raises:
        ValueError: The variable is neither 0 nor 1.
    """
    if elastic is not None:
        return elastic
    remedy = "Start the workers by `tfdist run --elastic`, which sets it, or unset it."
    number = optional_integer_variable(os.environ, _ELASTIC_VARIABLE, remedy=remedy) or 0
    if number > 1:
        raise ValueError(
            f"Invalid environment variable {_ELASTIC_VARIABLE}. Received: {_ELASTIC_VARIABLE}={number}. Expected: 0 or "
            f"1. {remedy}"
        )
    return number == 1


def beginning_workers(size: int) -> int:
    """Returns how many of the workers of an elastic run begin together, those of the lowest ranks; others join later.

    The environment variable `TFDIST_ELASTIC_WORKERS` says so, which `tfdist run --elastic MIN:MAX` sets; all without.

    Args:
        size: The largest number of workers.

    Raises:
        ValueError: The variable is not a number from 2 to `size`.
    """
    remedy = "Start the workers by `tfdist run --elastic MIN:MAX`, which sets it, or unset it."
    number = optional_integer_variable(os.environ, _BEGINNING_VARIABLE, remedy=remedy)
    if number is not None and not 2 <= number <= size:
        raise ValueError(
            f"Invalid environment variable {_BEGINNING_VARIABLE}. Received: {_BEGINNING_VARIABLE}={number} for {size} "
            f"addresses of workers. Expected: a number from 2 to {size}. {remedy}"
        )
    return size if number is None else number


def silence_limit_of_environment() -> float:
    """Returns how many seconds a worker may be silent before the others take it for lost.

    3600 s if `tfdist run` watches this process: it notices an exit at once, a stopped process within a second, and
    silent workers and nodes after `--heartbeat-timeout`, by messages that do not pass the link of the gradients. 60 s
    otherwise. The environment variable `TFDIST_SILENCE_LIMIT` has precedence; it must be equal on all workers.

    Raises:
        ValueError: The variable is not a positive whole number.
    """
    remedy = f"Set {_SILENCE_VARIABLE} to a number of seconds on all workers, or unset it."
    if limit := optional_integer_variable(os.environ, _SILENCE_VARIABLE, remedy=remedy):
        return float(limit)
    heartbeat = Heartbeat.from_environment()
    if heartbeat is None:
        return _SILENCE_SECONDS
    heartbeat.close()
    return _SILENCE_UNDER_LAUNCHER_SECONDS


def _is_duration(seconds: Any) -> bool:
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    return is_number and math.isfinite(seconds) and seconds > 0


def _num_logical_gpus() -> int:
    gpus = tf.config.list_physical_devices("GPU")
    return sum(len(tf.config.get_logical_device_configuration(gpu) or [None]) for gpu in gpus)
