"""What the measured connections say: clocks that differ, links that are slower than the others."""

from collections.abc import Mapping, Sequence

from tfdist.doctor.finding import OK, WARNING, Finding
from tfdist.doctor.link import Link
from tfdist.doctor.units import format_rate, format_seconds

MOST_SKEW_SECONDS = 1.0
_UNEVEN = 3.0


def clock_findings(reference: str, links: Sequence[Link]) -> list[Finding]:
    """Compares the clocks of all tasks with that of one.

    Args:
        reference: The task whose clock they are compared with.
        links: Those measured by it count.
    """
    own = [link for link in links if link.first == reference]
    if not own:
        return []
    wrong = [
        link for link in own if abs(link.clock_offset_seconds) - link.clock_uncertainty_seconds > MOST_SKEW_SECONDS
    ]
    if wrong:
        found = "; ".join(
            f"{link.second} is {_offset(link)} {'ahead of' if link.clock_offset_seconds > 0 else 'behind'} {reference}"
            for link in wrong
        )
        expected = f"clocks within {MOST_SKEW_SECONDS:g} s of each other"
        remedy = (
            "Start a time service (chronyc tracking, timedatectl). tfdist compares no clocks of two hosts, but logs, "
            "files on network file systems and certificates are dated by them."
        )
        return [Finding(WARNING, "clocks", found, expected, remedy)]
    worst = max(own, key=lambda link: abs(link.clock_offset_seconds))
    return [Finding(OK, "clocks", f"at most {_offset(worst)} from that of {reference}")]


def link_findings(links: Sequence[Link], hosts: Mapping[str, str]) -> list[Finding]:
    """Looks for links between hosts that are much slower than the fastest one.

    Args:
        links: All that were measured.
        hosts: The machine of each task; connections within one do not count.
    """
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
    slow = [f"{first} to {second} {format_rate(rate)}" for rate, first, second in rates if rate * _UNEVEN < fastest[0]]
    if not slow:
        return [Finding(OK, "links", f"{format_rate(min(rates)[0])} to {format_rate(fastest[0])} between hosts")]
    found = f"{', '.join(slow)}; {fastest[1]} to {fastest[2]} {format_rate(fastest[0])}"
    remedy = "Look at cable, port and negotiated speed of that host (ethtool), and at what else uses its link."
    expected = "links of about the same bandwidth: all workers wait for the slowest"
    return [Finding(WARNING, "links", found, expected, remedy)]


def _offset(link: Link) -> str:
    offset, uncertainty = (format_seconds(abs(x)) for x in (link.clock_offset_seconds, link.clock_uncertainty_seconds))
    return f"{offset} (± {uncertainty})"
