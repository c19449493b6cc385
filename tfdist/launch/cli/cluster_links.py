"""The links between the tasks of a cluster that is described in the environment, measured by the doctor's channel."""

from collections.abc import Callable, Mapping

from tfdist.cluster import ClusterConfig
from tfdist.planning.link_costs import Link
from tfdist.utils.argument_checks import UsageError


def measured_link(
    config: ClusterConfig, environ: Mapping[str, str], cores: int, timeout_seconds: float, say: Callable[[str], None]
) -> Link | None:
    """Measures all links with the other tasks; returns the slowest, or None where another task plans.

    Exchanges wait for the slowest link, so its bandwidth is the smallest of both directions of all links, and its
    latency half of the longest round trip.

    Raises:
        UsageError: Tasks did not answer each other, or a link could not be measured.
    """
    # Imported late: other commands do not need them.
    from tfdist.doctor.check_context import CheckContext
    from tfdist.doctor.check_runner import run_checks
    from tfdist.doctor.member_task import ReportSummary

    context = CheckContext(environ, cores, config)
    result = run_checks(context, timeout_seconds=timeout_seconds, say=say, checks=())
    if isinstance(result, ReportSummary):
        return None
    rates = [
        rate
        for measured in result.links
        for rate in (measured.bytes_per_second, measured.bytes_per_second_back)
        if rate
    ]
    errors = [finding.found for finding in result.findings if finding.level == "error"]
    if errors or not rates:
        raise UsageError(
            f"The links between the tasks cannot be measured. Received: {'; '.join(errors) or 'no measured link'}. "
            "Expected: tfdist plan runs as every task of the cluster at the same time. Start it as each of them "
            "(tfdist doctor finds what is wrong), or give --link without a cluster."
        )
    return Link(min(rates), max(measured.round_trip_seconds for measured in result.links) / 2)
