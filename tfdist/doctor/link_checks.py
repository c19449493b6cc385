"""Checks of the connections between tasks: reachability, clocks, bandwidth."""

from collections.abc import Mapping, Sequence, Set

from tfdist.doctor.link_measurement import LinkMeasurement
from tfdist.doctor.peer_connections import (
    OTHER_CLUSTER,
    OTHER_PROTOCOL,
    OTHER_TOKEN,
    REFUSED,
    RESOLVING,
    TOKEN_VARIABLE,
)
from tfdist.doctor.report import ERROR, OK, WARNING, Finding
from tfdist.utils.formatting import format_rate

MAX_CLOCK_DIFFERENCE_SECONDS = 1.0
_MAX_BANDWIDTH_RATIO = 3.0

# The remedies, by the first words of the reason.
_REMEDIES = {
    REFUSED: "Start tfdist doctor on that host at the same time as on the others, or increase --timeout.",
    "no answer": "Start the host, open the port in the firewall, or correct the address.",
    "the name": "Correct the name in the cluster's description, or repair /etc/hosts or the name server; in Kubernetes "
    "the headless service needs publishNotReadyAddresses: true.",
    RESOLVING: "Repair the name server, which is too slow, or use addresses.",
    OTHER_CLUSTER: "Describe the same cluster on all tasks: the same jobs and addresses in the same order.",
    OTHER_TOKEN: f"Set the same {TOKEN_VARIABLE} on all tasks, or on none.",
    OTHER_PROTOCOL: "Install the same version of tfdist on all hosts.",
}
_OTHER_REMEDY = (
    "Find the program that has that port (ss -ltnp on that host), and end it or correct the cluster's description."
)


def reachability_findings(
    missing: Mapping[str, Mapping[str, str]], addresses: Mapping[str, str], callers: Set[str] = frozenset()
) -> list[Finding]:
    """Returns an error for each task that did not answer and each reason; without any, a finding that all answer.

    `missing` has the tasks that did not answer, with the reasons, for each task that asked; `callers` have connected to
    this one.

    >>> [finding] = reachability_findings({"worker 0": {"worker 1": "no answer in 5 s"}}, {"worker 1": "b:2222"})
    >>> finding.found
    'worker 1 at b:2222 did not answer worker 0: no answer in 5 s'
    """
    askers: dict[tuple[str, str], list[str]] = {}
    for asker, reasons in missing.items():
        for task, reason in reasons.items():
            askers.setdefault((task, reason), []).append(asker)
    findings = []
    for (task, reason), asked in askers.items():
        found = f"{task} at {addresses.get(task, '?')} did not answer {', '.join(asked)}: {reason}"
        if task in callers:
            found += "; it connects to this task, so it runs"
        remedy = next((text for start, text in _REMEDIES.items() if reason.startswith(start)), _OTHER_REMEDY)
        findings.append(Finding(ERROR, "peers", found, "every task to answer every other task", remedy))
    if not findings and len(addresses) > 1:
        findings.append(Finding(OK, "peers", f"all {len(addresses)} tasks answer each other"))
    return findings


def clock_findings(reference: str, links: Sequence[LinkMeasurement]) -> list[Finding]:
    """Compares the clocks of all tasks with that of one task. Only measurements of `reference` count."""
    reference_links = [link for link in links if link.first == reference]
    if not reference_links:
        return []
    wrong = [
        link
        for link in reference_links
        if abs(link.clock_offset_seconds) - link.clock_uncertainty_seconds > MAX_CLOCK_DIFFERENCE_SECONDS
    ]
    if wrong:
        found = "; ".join(
            f"{link.second} is {link.clock_offset_text} "
            f"{'ahead of' if link.clock_offset_seconds > 0 else 'behind'} {reference}"
            for link in wrong
        )
        expected = f"clocks within {MAX_CLOCK_DIFFERENCE_SECONDS:g} s of each other"
        remedy = (
            "Start a time service (chronyc tracking, timedatectl). tfdist does not compare clocks of two hosts, but "
            "logs, files on network file systems and certificates depend on them."
        )
        return [Finding(WARNING, "clocks", found, expected, remedy)]
    worst = max(reference_links, key=lambda link: abs(link.clock_offset_seconds))
    return [Finding(OK, "clocks", f"at most {worst.clock_offset_text} from that of {reference}")]


def link_findings(links: Sequence[LinkMeasurement], hosts: Mapping[str, str]) -> list[Finding]:
    """Finds connections between different `hosts` that are much slower than the fastest one."""
    rates = [
        (rate, first, second)
        for link in links
        if hosts.get(link.first) != hosts.get(link.second)
        for rate, first, second in (
            (link.bytes_per_second, link.first, link.second),
            (link.bytes_per_second_back, link.second, link.first),
        )
        if rate
    ]
    if not rates:
        return []
    fastest = max(rates)
    slow = [
        f"{first} to {second} {format_rate(rate)}"
        for rate, first, second in rates
        if rate * _MAX_BANDWIDTH_RATIO < fastest[0]
    ]
    if not slow:
        return [Finding(OK, "links", f"{format_rate(min(rates)[0])} to {format_rate(fastest[0])} between hosts")]
    found = f"{', '.join(slow)}; {fastest[1]} to {fastest[2]} {format_rate(fastest[0])}"
    expected = "connections of about the same bandwidth: all workers wait for the slowest"
    remedy = "Check the cable, port and negotiated speed of that host (ethtool), and what else uses its connection."
    return [Finding(WARNING, "links", found, expected, remedy)]
