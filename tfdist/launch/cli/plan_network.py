"""Where the workers of a plan are, what each of them has, and the measured links between them."""

import argparse
import dataclasses
from collections.abc import Callable, Mapping

from tfdist import cluster
from tfdist.cluster import ClusterConfig
from tfdist.planning.cost_terms import Conditions
from tfdist.planning.link_costs import LinkSpeed
from tfdist.planning.measurements import Measurements
from tfdist.utils.argument_checks import UsageError
from tfdist.utils.cores_and_ports import usable_cores

LOOPBACK = LinkSpeed(bytes_per_second=1e12)
"""No limit: what transfers between two processes of one machine cost is in their measured seconds."""

_TIMEOUT_OF_PEERS = 60.0


@dataclasses.dataclass(frozen=True)
class PlannedNetwork:
    """Where the workers are."""

    workers: tuple[int, ...]  # their numbers
    link: LinkSpeed | None  # the connection of each; None: they are on this machine, and share its cores and its memory
    cores: int  # cores of each
    cluster: str = ""  # what describes the cluster whose tasks they are: "Slurm", for example; empty: none


def network_of(
    options: argparse.Namespace, environ: Mapping[str, str], say: Callable[[str], None]
) -> PlannedNetwork | None:
    """Returns where the workers are, according to the options or the environment.

    If `environ` describes a cluster, its links are measured.

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
        cores_per_worker = options.cores_per_worker or max(cores // workers_on_own_host(config), 1)
        return PlannedNetwork(options.workers or (len(config.cluster.workers),), link, cores_per_worker, config.source)
    if options.link is not None:
        return PlannedNetwork(
            options.workers or (len(options.speeds) or 2,), options.link, options.cores_per_worker or cores
        )
    workers = options.workers or tuple(sorted({1, cores}))
    return PlannedNetwork(workers, None, options.cores_per_worker or max(cores // max(workers), 1))


def conditions_of(
    options: argparse.Namespace, measured: Measurements, link: LinkSpeed, workers: int, *, shares_memory: bool
) -> Conditions:
    """Returns the conditions of a search.

    Raises:
        UsageError: The memory of this machine is not known.
    """
    machine_memory_bytes = measured.machine.memory_bytes
    if options.memory is None and not machine_memory_bytes:
        raise UsageError(
            "The memory of this machine is not known. Received: no --memory, on a system without /proc/meminfo. "
            "Expected: the memory of a worker, for example --memory 16GiB."
        )
    return Conditions(
        link,
        options.memory or (machine_memory_bytes // workers if shares_memory else machine_memory_bytes),
        cores=measured.machine.cores_per_worker,
        devices=options.devices,
        allow_compression=options.allow_compression,
        allow_local_updates=options.allow_local_updates,
        speeds=options.speeds if len(options.speeds) == workers else (),
    )


def measured_link(
    config: ClusterConfig, environ: Mapping[str, str], cores: int, timeout_seconds: float, say: Callable[[str], None]
) -> LinkSpeed | None:
    """Measures all links with the other tasks; returns the slowest, or None where another task plans.

    Raises:
        UsageError: Tasks did not answer each other, or a link could not be measured.
    """
    # Imported late: other commands do not need them.
    from tfdist.doctor.check_context import CheckContext
    from tfdist.doctor.check_runner import run_checks
    from tfdist.doctor.link_measurement import slowest_link
    from tfdist.doctor.member_task import ReportSummary

    context = CheckContext(environ, cores, config)
    result = run_checks(context, timeout_seconds=timeout_seconds, say=say, checks=())
    if isinstance(result, ReportSummary):
        return None
    link = slowest_link(result.links)
    errors = [finding.found for finding in result.findings if finding.level == "error"]
    if errors or link is None:
        raise UsageError(
            f"The links between the tasks cannot be measured. Received: {'; '.join(errors) or 'no measured link'}. "
            "Expected: tfdist plan runs as every task of the cluster at the same time. Start it as each of them "
            "(tfdist doctor finds what is wrong), or give --link without a cluster."
        )
    return link
