"""Looks at this machine, and at the cluster if there is one."""

import socket
import time
from collections.abc import Callable, Sequence

from tfdist.cluster import ClusterConfig
from tfdist.doctor.conductor import Conductor
from tfdist.doctor.finding import ERROR, OK, Finding
from tfdist.doctor.libraries import compare_versions
from tfdist.doctor.machine import CHECKS, Check, check_machine
from tfdist.doctor.member import Member, Verdict
from tfdist.doctor.own_port import free_port, listen, taken_port
from tfdist.doctor.reachability import reachability_findings
from tfdist.doctor.report import Report
from tfdist.doctor.situation import Situation, host_of, port_of

_MOST_SECONDS_OF_A_PAIR = 20.0
_MOST_SECONDS_OF_CHECKS = 240.0
_TELL_SECONDS = 5.0
_LOOK_SECONDS = 0.2
_LAST_TRIAL_SECONDS = 10.0


def examine(
    situation: Situation,
    *,
    timeout_seconds: float,
    say: Callable[[str], None],
    checks: Sequence[Check] = CHECKS,
    clock: Callable[[], float] = time.time,
    findings: Sequence[Finding] = (),
) -> Report | Verdict:
    """Looks at this machine, and with its peers at the cluster.

    Args:
        situation: The machine and the cluster.
        timeout_seconds: How long to wait for peers.
        say: Tells the user how far it is.
        checks: The checks of this machine.
        clock: Tells the time of this machine, in seconds since 1970.
        findings: What is known already.

    Returns:
        The report; or the verdict where the first task of the cluster has the report.
    """
    known = [finding.on(situation.task) for finding in findings]
    if situation.config is None or situation.task not in situation.addresses:
        which = "described" if situation.config is None else f"with an address for {situation.task}"
        alone = Finding(OK, "peers", f"no cluster {which}: this machine alone is looked at", task=situation.task)
        return Report(situation, (*known, *check_machine(situation, checks), alone))
    address = situation.addresses[situation.task]
    host, port = host_of(address), port_of(address)
    server: socket.socket | None = None
    try:
        server = listen(host, port)
        own_port = free_port(situation, host, port)
    except OSError as error:
        own_port = taken_port(situation, port, error)
    member = Member(situation, situation.config, server, clock=clock)
    try:
        known.append(own_port.on(situation.task))
        member.findings_of_machine(known + check_machine(situation, checks))
        member.peers.dial(timeout_seconds)
        _wait_for_peers(member, timeout_seconds, say)
        return Conductor(member, say).conduct() if member.is_conductor else _follow(member, situation.config)
    finally:
        member.close()


def _wait_for_peers(member: Member, timeout_seconds: float, say: Callable[[str], None]) -> None:
    began = told = time.monotonic()
    while not member.peers.wait(_LOOK_SECONDS):
        now = time.monotonic()
        if now >= began + timeout_seconds + _LAST_TRIAL_SECONDS or member.has_been_left:
            break
        if now >= told + _TELL_SECONDS:
            told = now
            say("waiting for " + "; ".join(f"{task} ({reason})" for task, reason in member.peers.missing.items()))
    member.peers.stop_waiting()
    member.peers.wait(_LAST_TRIAL_SECONDS)


def _follow(member: Member, config: ClusterConfig) -> Report | Verdict:
    """Waits until the conductor has made its report; without one this task makes its own."""
    pairs = len(member.situation.addresses) * 2
    end = time.monotonic() + _MOST_SECONDS_OF_CHECKS + pairs * _MOST_SECONDS_OF_A_PAIR
    while not member.told.wait(0.1) and time.monotonic() < end:
        if member.is_without_conductor:
            break
    member.told.wait(0.1)  # the verdict comes just before the conductor leaves
    if member.verdict is not None:
        return member.verdict
    answered = member.peers.answered
    versions = {member.task: member.about.versions}
    versions |= {task: peer.about.versions for task, peer in answered.items() if peer.about is not None}
    hosts = {member.task: member.about.host}
    hosts |= {task: peer.about.host for task, peer in answered.items() if peer.about is not None}
    left = []
    if member.conductor in member.visitors:
        found = f"{member.conductor} left before it had a report"
        left = [Finding(ERROR, "peers", found, "a report", f"Look at the output of {member.conductor}.")]
    findings = [
        *(member.findings or ()),
        *left,
        *reachability_findings({member.task: member.peers.missing}, member.situation.addresses, member.visitors),
        *compare_versions(versions),
    ]
    return Report(member.situation, tuple(findings), hosts)
