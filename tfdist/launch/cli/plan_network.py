"""Where the workers of a plan are, and what each of them has."""

import argparse
import dataclasses
from collections.abc import Callable, Mapping

from tfdist import cluster
from tfdist.launch.cli.cluster_links import measured_link
from tfdist.planning.conditions import Conditions
from tfdist.planning.link_costs import Link
from tfdist.planning.measurements import Measurements
from tfdist.utils.argument_checks import UsageError
from tfdist.utils.cores_and_ports import usable_cores

LOOPBACK = Link(bytes_per_second=1e12)
"""No limit: what transfers between two processes of one machine cost is in their measured seconds."""

_TIMEOUT_OF_PEERS = 60.0


@dataclasses.dataclass(frozen=True)
class PlannedNetwork:
    """Where the workers are.

    Attributes:
        workers: Their numbers.
        link: The connection of each; None: they are on this machine, and share its cores and its memory.
        cores: Cores of each.
        cluster: What describes the cluster whose tasks they are: "Slurm", for example; empty: none.
    """

    workers: tuple[int, ...]
    link: Link | None
    cores: int
    cluster: str = ""


def network_of(
    options: argparse.Namespace, environ: Mapping[str, str], say: Callable[[str], None]
) -> PlannedNetwork | None:
    """Returns where the workers are, as the options or the environment say.

    Args:
        options: The options of `tfdist plan`.
        environ: The environment, which may describe a cluster: then its links are measured.
        say: Shows progress to the user.

    Returns:
        None in a task of a cluster that does not plan.

    Raises:
        UsageError: The description of the cluster is invalid, or its tasks do not answer.
    """
    cores = usable_cores()
    if options.simulate:
        return PlannedNetwork(options.workers, options.topology.port, options.cores_per_worker or cores)
    try:
        config = cluster.detect(environ)
    except ValueError as error:
        raise UsageError(f"{error} Or unset it, and describe the network by --link.") from error
    if config is not None and options.link is None and len(config.cluster.workers) > 1:
        from tfdist.doctor.check_context import workers_on_own_host

        link = measured_link(config, environ, cores, _TIMEOUT_OF_PEERS, say)
        if link is None:
            return None
        own = options.cores_per_worker or max(cores // workers_on_own_host(config), 1)
        return PlannedNetwork(options.workers or (len(config.cluster.workers),), link, own, config.source)
    if options.link is not None:
        return PlannedNetwork(
            options.workers or (len(options.speeds) or 2,), options.link, options.cores_per_worker or cores
        )
    workers = options.workers or tuple(sorted({1, cores}))
    return PlannedNetwork(workers, None, options.cores_per_worker or max(cores // max(workers), 1))


def conditions_of(
    options: argparse.Namespace, measured: Measurements, link: Link, workers: int, *, shares_memory: bool
) -> Conditions:
    """Returns the conditions of a search.

    Args:
        options: The options of `tfdist plan`.
        measured: The measured machine.
        link: The connection of each worker.
        workers: Their number.
        shares_memory: Whether they are on one machine.

    Raises:
        UsageError: The memory of this machine is not known.
    """
    here = measured.machine.memory_bytes
    if options.memory is None and not here:
        raise UsageError(
            "The memory of this machine is not known. Received: no --memory, on a system without /proc/meminfo. "
            "Expected: the memory of a worker, for example --memory 16GiB."
        )
    return Conditions(
        link,
        options.memory or (here // workers if shares_memory else here),
        cores=measured.machine.cores_per_worker,
        devices=options.devices,
        allow_compression=options.allow_compression,
        allow_local_updates=options.allow_local_updates,
        speeds=options.speeds if len(options.speeds) == workers else (),
    )
