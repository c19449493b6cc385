"""The first task's part: asks all others, lets one pair of tasks at a time measure, and creates the report."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence

from tfdist.doctor.checkpoint_checks import marked
from tfdist.doctor.compression_advice import advise
from tfdist.doctor.library_checks import START_TIMEOUT_SECONDS, compare_versions
from tfdist.doctor.link_checks import clock_findings, link_findings, reachability_findings
from tfdist.doctor.link_measurement import TRANSFER_SECONDS, LinkMeasurement
from tfdist.doctor.member_task import MemberTask
from tfdist.doctor.peer_connections import Peer
from tfdist.doctor.report import ERROR, OK, Finding, Report
from tfdist.transport.transport_errors import ConnectionClosedError
from tfdist.utils.formatting import printable

_ANSWER_SECONDS = 10.0
_CHECKS_SECONDS = START_TIMEOUT_SECONDS + 60.0
_DIAL_SECONDS = 20.0
_MEASURE_SECONDS = 6 * TRANSFER_SECONDS
_PAUSE_SECONDS = 0.1
_MAX_ALL_PAIRS_TASKS = 4


class ChiefTask:
    """Runs the checks of a cluster whose tasks are connected."""

    def __init__(self, member: MemberTask, say: Callable[[str], None]) -> None:
        self._member, self._say = member, say
        self._lost: dict[str, str] = {}  # tasks that do not answer any more, with the reasons

    def run(self) -> Report:
        """Asks, measures, sends the others a summary, and returns the report."""
        member, context = self._member, self._member.context
        for task in self._wait("checked", _CHECKS_SECONDS):
            self._lost[task] = "its own checks did not end"
        for peer in self._present():
            self._ask(peer, do="stop_waiting")
        self._wait("dialed", _DIAL_SECONDS)  # a task that still resolves a name reports so
        findings = list(member.findings or ())
        missing: dict[str, Mapping[str, str]] = {member.task: member.peers.missing}
        for peer in self._present():
            findings += self._report_of(peer, missing)
        links, broken = self._measure_all(missing)
        infos = [member.info, *(peer.info for peer in member.peers.answered.values() if peer.info is not None)]
        hosts = {info.task: info.host for info in infos}
        findings += reachability_findings(missing, context.addresses, member.callers)
        findings += compare_versions({info.task: info.versions for info in infos})
        findings += clock_findings(member.task, links)
        findings += broken or link_findings(links, hosts)
        findings += self._shared_directory()
        for task, reason in self._lost.items():
            found = f"{task} left before the report: {reason}"
            findings.append(Finding(ERROR, "peers", found, "answers of all tasks", f"Read the output of {task}."))
        advice = None
        if context.config is not None and "ps" not in context.config.cluster.jobs:
            workers = set(map(str, context.config.cluster.workers))
            between_workers = [link for link in links if {link.first, link.second} <= workers]
            advice = advise(context.parameters, len(workers), between_workers)
        report = Report(context, tuple(findings), hosts, tuple(links), advice)
        for peer in self._present():
            self._ask(peer, do="summary", errors=report.errors, warnings=report.warnings)
        return report

    def _present(self) -> list[Peer]:
        return [peer for task, peer in self._member.peers.answered.items() if task not in self._lost]

    def _ask(self, peer: Peer, **request: object) -> dict[str, object] | None:
        """Asks a peer; counts it as lost and returns None if it does not answer."""
        if peer.connection is None:
            return None
        try:
            return peer.connection.request(timeout_seconds=_ANSWER_SECONDS, **request)
        except ConnectionClosedError as error:
            self._lost[peer.task] = printable(error)
            return None

    def _wait(self, state_name: str, timeout_seconds: float) -> list[str]:
        """Waits until a state is true for all peers; returns the tasks that are late."""
        late_tasks, deadline = [], time.monotonic() + timeout_seconds
        for peer in self._present():
            while (state := self._ask(peer, do="state")) is not None and not state.get(state_name):
                if time.monotonic() >= deadline:
                    late_tasks.append(peer.task)
                    break
                time.sleep(_PAUSE_SECONDS)
        return late_tasks

    def _report_of(self, peer: Peer, missing: dict[str, Mapping[str, str]]) -> list[Finding]:
        """Returns the findings of a peer, and adds the tasks that it misses to `missing`."""
        answer = self._ask(peer, do="report")
        if answer is None:
            return []
        try:
            documents, unanswered = answer.get("findings"), answer.get("missing")
            if not isinstance(documents, list) or not isinstance(unanswered, dict):
                raise ValueError("not a report")
            findings = [Finding.from_json(document).on(peer.task) for document in documents]
        except ValueError:
            self._lost[peer.task] = "its report is malformed"
            return []
        missing[peer.task] = {
            task: printable(reason) for task, reason in unanswered.items() if task in self._member.context.addresses
        }
        return findings

    def _measure_all(self, missing: Mapping[str, Mapping[str, str]]) -> tuple[list[LinkMeasurement], list[Finding]]:
        tasks = [self._member.task, *(peer.task for peer in self._present())]
        pairs = [pair for pair in planned_pairs(tasks) if pair[1] not in missing.get(pair[0], ())]
        links: list[LinkMeasurement] = []
        findings: list[Finding] = []
        if pairs:
            self._say(f"measuring {len(pairs)} connection{'s' if len(pairs) > 1 else ''}, one at a time")
        for first, second, with_bandwidth in pairs:
            if {first, second} & self._lost.keys():
                continue
            try:
                links.append(self._measure(first, second, with_bandwidth=with_bandwidth))
            except (ConnectionClosedError, ValueError) as error:
                if first == self._member.task:  # the chief's requests use the same connection
                    self._lost[second] = "its connection broke during the measurement"
                found = f"the connection of {first} and {second} could not be measured: {printable(error)}"
                expected = "a connection that carries large transfers as well as small ones"
                remedy = (
                    "Compare the MTU of both hosts and of the network between them (ip link; ping -M do -s 1472): only "
                    "small messages pass. Look for lost packets (ip -s link)."
                )
                findings.append(Finding(ERROR, "links", found, expected, remedy))
        return links, findings

    def _measure(self, first: str, second: str, *, with_bandwidth: bool) -> LinkMeasurement:
        if first == self._member.task:
            return self._member.measure(second, with_bandwidth=with_bandwidth)
        connection = self._member.peers.all[first].connection
        if connection is None:
            raise ConnectionClosedError(f"{first} has not answered")
        request = {"do": "measure", "peer": second, "bandwidth": with_bandwidth}
        link = LinkMeasurement.from_json(connection.request(timeout_seconds=_MEASURE_SECONDS, **request))
        if (link.first, link.second) != (first, second):
            raise ValueError("measurement of another connection")
        return link

    def _shared_directory(self) -> list[Finding]:
        """Checks that the directory for checkpoints is the same on all tasks."""
        directory, peers = self._member.context.checkpoints, self._present()
        if directory is None or not peers:
            return []
        try:
            with marked(directory) as name:
                answers = {peer.task: self._ask(peer, do="see_marker", name=name) for peer in peers}
        except OSError:
            return []  # `check_checkpoints` has reported it
        seen = {task: answer.get("seen") for task, answer in answers.items() if answer is not None}
        blind = [task for task, sees in seen.items() if sees is False]
        if blind:
            found = f"{directory} of {', '.join(blind)} is another directory than that of {self._member.task}"
            expected = "one directory for all workers: each writes a part of a checkpoint"
            remedy = "Mount one file system on all hosts (NFS, Lustre, a shared volume), and choose a directory in it."
            return [Finding(ERROR, "shared checkpoints", found, expected, remedy)]
        if not any(seen.values()):
            return []
        return [Finding(OK, "shared checkpoints", f"{directory} is the same directory on all tasks")]


def planned_pairs(tasks: Sequence[str]) -> list[tuple[str, str, bool]]:
    """Returns the connections to measure, in order: first task, second task, and whether to measure the bandwidth.

    Up to four tasks measure all pairs. More tasks measure the neighbours in a ring, two connections of each task, and
    the round trip from the first task to all.

    >>> planned_pairs(["worker 0", "worker 1"])
    [('worker 0', 'worker 1', True)]
    >>> len(planned_pairs(list("abcdef")))
    9
    """
    if len(tasks) <= _MAX_ALL_PAIRS_TASKS:
        return [(first, second, True) for first, second in itertools.combinations(tasks, 2)]
    ring = [(tasks[0], tasks[1]), *itertools.pairwise(tasks[1:]), (tasks[0], tasks[-1])]
    chief_pairs = [(tasks[0], task) for task in tasks[2:-1]]
    return [(*pair, True) for pair in ring] + [(*pair, False) for pair in chief_pairs]
