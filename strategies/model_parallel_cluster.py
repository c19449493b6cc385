"""Connects a model-parallel strategy to the workers that the environment describes."""

import sys

import tensorflow as tf

from tfdist import cluster
from tfdist.servers.server_monitor import ServerMonitor, wait_for_servers
from tfdist.servers.serving import serve

_connected: tuple[cluster.ClusterSpec, ServerMonitor] | None = None


def connect_to_workers(start_timeout_seconds: float) -> ServerMonitor | None:
    """Connects the chief to its workers. In the process of a worker it serves until the chief has ended, then exits.

    Args:
        start_timeout_seconds: How long to wait for the workers.

    Returns:
        What notices that a worker is lost; None if the environment describes no cluster, or one of this process alone.

    Raises:
        ValueError: The cluster is not one of a chief and its workers.
        TimeoutError: Workers did not start in time; the message names them.
    """
    global _connected
    config = cluster.detect()
    if config is None or sum(map(len, config.cluster.jobs.values())) == 1:
        return None
    jobs = config.cluster.jobs
    if set(jobs) != {"chief", "worker"} or len(jobs["chief"]) != 1:
        raise ValueError(
            "There is no cluster with a chief for the stages of a model. Received: a cluster of "
            f"{ {job: len(tasks) for job, tasks in sorted(jobs.items())} }, the number of tasks of each job. Expected: "
            "one chief, which runs the script, and workers, which hold the stages. Start the script by tfdist run "
            "--chief --workers N script.py, or correct TF_CONFIG."
        )
    if config.task.type == "worker":
        serve(jobs, config.task.type, config.task.index)
        sys.exit(0)
    if _connected is None or _connected[0] != config.cluster:
        wait_for_servers(jobs, start_timeout_seconds)
        tf.config.experimental_connect_to_cluster(
            tf.train.ClusterSpec({job: list(addresses) for job, addresses in jobs.items()}), "chief", 0, protocol="grpc"
        )
        _connected = config.cluster, ServerMonitor("worker", jobs["worker"])
    return _connected[1]


def default_devices() -> list[str]:
    """Returns the devices of all workers in their order, or without a cluster those of this process.

    Of each process these are its GPUs; without GPUs, its CPU devices.
    """
    by_task: dict[int, list[tf.config.LogicalDevice]] = {}
    devices = tf.config.list_logical_devices()
    specs = {device.name: tf.DeviceSpec.from_string(device.name) for device in devices}
    is_connected = any(spec.job == "worker" for spec in specs.values())
    for device in devices:
        spec = specs[device.name]
        if device.device_type in ("CPU", "GPU") and (spec.job == "worker" or not is_connected):
            by_task.setdefault(spec.task or 0, []).append(device)
    found = []
    for _, of_task in sorted(by_task.items()):
        gpus = [device.name for device in of_task if device.device_type == "GPU"]
        found += gpus or [device.name for device in of_task]
    return found
