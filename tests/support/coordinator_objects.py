"""Looks up the private attributes of a coordinator's objects in a cluster of this process, and prints the missing ones.

Run as a program: TensorFlow connects a process to one cluster only, until it ends.
"""

import os
import sys
from dataclasses import replace
from functools import partial

import tensorflow as tf

from tfdist.private_symbols import check_attributes, instance_kinds
from tfdist.tensorflow_internals import tensorflow_attributes  # noqa: F401
from tfdist.utils.cores_and_ports import ReservedPorts


def main() -> None:
    """Starts a parameter server and a worker, and looks at what their coordinator has."""
    with ReservedPorts(2) as reserved:
        ports = reserved.ports
    cluster = tf.train.ClusterSpec({"ps": [f"localhost:{ports[0]}"], "worker": [f"localhost:{ports[1]}"]})
    servers = [tf.distribute.Server(cluster, job_name=job, protocol="grpc") for job in ("ps", "worker")]
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    objects = {
        "ParameterServerStrategyV2Extended()": strategy.extended,
        "ClusterCoordinator()": coordinator,
        "WorkerPreemptionHandler()": coordinator._cluster.failure_handler,
        "Worker()": coordinator._cluster.workers[0],
    }
    kinds = [kind for kind in instance_kinds() if kind.make is None]
    names = [kind.path.rpartition(".")[2].rpartition(":")[2] for kind in kinds]
    found = [replace(kind, make=partial(objects.pop, name)) for kind, name in zip(kinds, names, strict=True)]
    checked = check_attributes(found)
    sys.stdout.write(f"{checked} attributes, {len(objects)} unused objects of {len(servers)} servers\n")
    sys.stdout.flush()
    os._exit(0)  # without waiting for the servers


if __name__ == "__main__":
    main()
