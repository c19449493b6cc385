"""Runs the checks of this machine and, if there is one, of the cluster."""

import socket
import time
from collections.abc import Callable, Sequence

from tfdist.doctor.check_context import CheckContext, host_of
from tfdist.doctor.checkpoint_checks import check_checkpoints
from tfdist.doctor.chief_task import ChiefTask
from tfdist.doctor.library_checks import (
    check_hash_seed,
    check_libraries,
    check_python,
    check_tensorflow_start,
    compare_versions,
)
from tfdist.doctor.link_checks import reachability_findings
from tfdist.doctor.member_task import MemberTask, ReportSummary
from tfdist.doctor.network_checks import (
    check_own_address,
    check_own_name,
    check_proxy,
    check_token,
    free_port,
    listen,
    taken_port,
)
from tfdist.doctor.object_store_checks import check_object_store
from tfdist.doctor.report import ERROR, OK, WARNING, Finding, Report
from tfdist.doctor.resource_checks import check_cores, check_memory, check_open_files, check_shared_memory
from tfdist.utils.cores_and_ports import host_and_port

Check = Callable[[CheckContext], list[Finding]]
MACHINE_CHECKS: tuple[Check, ...] = (
    check_python,
    check_libraries,
    check_hash_seed,
    check_tensorflow_start,
    check_cores,
    check_memory,
    check_open_files,
    check_shared_memory,
    check_own_name,
    check_own_address,
    check_token,
    check_proxy,
    check_checkpoints,
    check_object_store,
)

_MAX_CHECKS_SECONDS = 240.0
_MAX_PAIR_SECONDS = 20.0
_REPORT_SECONDS = 5.0  # between two lines about missing peers
_POLL_SECONDS = 0.2
_LAST_TRY_SECONDS = 10.0


def run_machine_checks(context: CheckContext, checks: Sequence[Check] = MACHINE_CHECKS) -> list[Finding]:
    """Runs the checks of this machine, one after another. A check that raises becomes a finding."""
    findings = []
    for check in checks:
        try:
            findings += check(context)
        except (OSError, ValueError) as error:
            name = check.__name__.removeprefix("check_").replace("_", " ")
            remedy = "Check it manually: this system does not allow the check."
            findings.append(Finding(WARNING, name, f"the check failed: {error}", "a result", remedy))
    return [finding.on(context.task) for finding in findings]


def run_checks(
    context: CheckContext,
    *,
    timeout_seconds: float,
    say: Callable[[str], None],
    checks: Sequence[Check] = MACHINE_CHECKS,
    clock: Callable[[], float] = time.time,
    findings: Sequence[Finding] = (),
) -> Report | ReportSummary:
    """Checks this machine and, with its peers, the cluster; returns a summary if its first task has the report.

    The report includes the earlier `findings`. `clock` returns the time of this machine, in seconds since 1970.
    """
    known = [finding.on(context.task) for finding in findings]
    if context.config is None or context.task not in context.addresses:
        which = "" if context.config is None else f" with an address for {context.task}"
        alone = Finding(OK, "peers", f"no cluster{which}: only this machine is checked", task=context.task)
        return Report(context, (*known, *run_machine_checks(context, checks), alone))
    address = context.addresses[context.task]
    host, port = host_of(address), host_and_port(address)[1]
    server: socket.socket | None = None
    try:
        server = listen(host, port)
        own_port = free_port(context, host, port)
    except OSError as error:
        own_port = taken_port(context, port, error)
    member = MemberTask(context, context.config, server, clock=clock)
    try:
        known.append(own_port.on(context.task))
        member.findings = known + run_machine_checks(context, checks)
        member.peers.dial(timeout_seconds)
        _wait_for_peers(member, timeout_seconds, say)
        return ChiefTask(member, say).run() if member.is_chief else _wait_for_summary(member)
    finally:
        member.close()


def _wait_for_peers(member: MemberTask, timeout_seconds: float, say: Callable[[str], None]) -> None:
    began = said_at = time.monotonic()
    while not member.peers.wait(_POLL_SECONDS):
        now = time.monotonic()
        if now >= began + timeout_seconds + _LAST_TRY_SECONDS or member.chief_left:
            break
        if now >= said_at + _REPORT_SECONDS:
            said_at = now
            say("waiting for " + "; ".join(f"{task} ({reason})" for task, reason in member.peers.missing.items()))
    member.peers.stop_waiting()
    member.peers.wait(_LAST_TRY_SECONDS)


def _wait_for_summary(member: MemberTask) -> Report | ReportSummary:
    """Waits until the chief has its report; without a chief this task creates a report."""
    context, peers = member.context, member.peers
    pairs = len(context.addresses) * 2
    deadline = time.monotonic() + _MAX_CHECKS_SECONDS + pairs * _MAX_PAIR_SECONDS
    while not member.has_summary.wait(0.1) and time.monotonic() < deadline:
        if member.is_without_chief:
            break
    member.has_summary.wait(0.1)  # the summary arrives just before the chief leaves
    if member.summary is not None:
        return member.summary
    infos = [member.info, *(peer.info for peer in peers.answered.values() if peer.info is not None)]
    lost_chief_findings = []
    if member.chief in member.callers:
        found, remedy = f"{member.chief} left before it had a report", f"Read the output of {member.chief}."
        lost_chief_findings = [Finding(ERROR, "peers", found, "a report", remedy)]
    findings = [
        *(member.findings or ()),
        *lost_chief_findings,
        *reachability_findings({member.task: peers.missing}, context.addresses, member.callers),
        *compare_versions({info.task: info.versions for info in infos}),
    ]
    return Report(context, tuple(findings), {info.task: info.host for info in infos})
