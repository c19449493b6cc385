"""The first task's part: it asks all others, has one pair at a time measure, and makes the report."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence

from tfdist.doctor.advice import advise
from tfdist.doctor.channel import ChannelError
from tfdist.doctor.checkpoint_directory import marked
from tfdist.doctor.finding import ERROR, OK, Finding, printable
from tfdist.doctor.libraries import compare_versions
from tfdist.doctor.link import Link
from tfdist.doctor.member import Member
from tfdist.doctor.network import clock_findings, link_findings
from tfdist.doctor.peers import Peer
from tfdist.doctor.reachability import reachability_findings
from tfdist.doctor.report import Report
from tfdist.doctor.service import TRANSFER_SECONDS
from tfdist.doctor.tensorflow_start import LIMIT_SECONDS

_ANSWER_SECONDS = 10.0
_CHECKS_SECONDS = LIMIT_SECONDS + 60.0
_DIAL_SECONDS = 20.0
_MEASURE_SECONDS = 6 * TRANSFER_SECONDS
_PAUSE_SECONDS = 0.1
_ALL_PAIRS_TASKS = 4


class Conductor:
    """Conducts the examination of a cluster whose tasks have been dialed.

    Args:
        member: The first task. Its own machine has been looked at.
        say: Tells the user how far it is.
    """

    def __init__(self, member: Member, say: Callable[[str], None]) -> None:
        self._member, self._say = member, say
        self._lost: dict[str, str] = {}

    def conduct(self) -> Report:
        """Asks, measures, tells the others how it went, and returns the report."""
        member, situation = self._member, self._member.situation
        for task in self._wait("checked", _CHECKS_SECONDS):
            self._lost[task] = "its own checks did not end"
        for peer in self._present():
            self._ask(peer, do="conclude")
        self._wait("dialed", _DIAL_SECONDS)  # one that still resolves a name says so in its report
        findings = list(member.findings or ())
        missing: dict[str, Mapping[str, str]] = {member.task: member.peers.missing}
        for peer in self._present():
            findings += self._report_of(peer, missing)
        links, broken = self._measure_all(missing)
        hosts = {member.task: member.about.host}
        versions = {member.task: member.about.versions}
        for task, peer in member.peers.answered.items():
            if peer.about is not None:
                hosts[task], versions[task] = peer.about.host, peer.about.versions
        findings += reachability_findings(missing, situation.addresses, member.visitors)
        findings += compare_versions(versions)
        findings += clock_findings(member.task, links)
        findings += broken or link_findings(links, hosts)
        findings += self._shared_directory()
        for task, reason in self._lost.items():
            expected, remedy = "an answer to every question", f"Look at the output of {task}."
            findings.append(Finding(ERROR, "peers", f"{task} left the examination: {reason}", expected, remedy))
        advice = None
        if situation.config is not None and "ps" not in situation.config.cluster.jobs:
            workers = set(map(str, situation.config.cluster.workers))
            between = [link for link in links if {link.first, link.second} <= workers]
            advice = advise(situation.parameters, len(workers), between)
        report = Report(situation, tuple(findings), hosts, tuple(links), advice)
        for peer in self._present():
            self._ask(peer, do="verdict", errors=report.errors, warnings=report.warnings)
        return report

    def _present(self) -> list[Peer]:
        return [peer for task, peer in self._member.peers.answered.items() if task not in self._lost]

    def _ask(
        self, peer: Peer, *, limit_seconds: float = _ANSWER_SECONDS, **request: object
    ) -> dict[str, object] | None:
        """Asks a peer; returns None, and counts it as lost, where it does not answer."""
        if peer.channel is None:
            return None
        try:
            return peer.channel.ask(limit_seconds=limit_seconds, **request)
        except ChannelError as error:
            self._lost[peer.task] = printable(error)
            return None

    def _wait(self, what: str, limit_seconds: float) -> list[str]:
        """Waits until a state is true of all peers; returns those of which it is not in time."""
        late, end = [], time.monotonic() + limit_seconds
        for peer in self._present():
            while (state := self._ask(peer, do="state")) is not None and not state.get(what):
                if time.monotonic() >= end:
                    late.append(peer.task)
                    break
                time.sleep(_PAUSE_SECONDS)
        return late

    def _report_of(self, peer: Peer, missing: dict[str, Mapping[str, str]]) -> list[Finding]:
        answer = self._ask(peer, do="report")
        if answer is None:
            return []
        try:
            said, unanswered = answer.get("findings"), answer.get("missing")
            if not isinstance(said, list) or not isinstance(unanswered, dict):
                raise ValueError("no report")
            findings = [Finding.from_json(document).on(peer.task) for document in said]
        except ValueError:
            self._lost[peer.task] = "what it said is no report"
            return []
        missing[peer.task] = {
            task: printable(reason) for task, reason in unanswered.items() if task in self._member.situation.addresses
        }
        return findings

    def _measure_all(self, missing: Mapping[str, Mapping[str, str]]) -> tuple[list[Link], list[Finding]]:
        tasks = [self._member.task, *(peer.task for peer in self._present())]
        plan = [pair for pair in planned_pairs(tasks) if pair[1] not in missing.get(pair[0], ())]
        links: list[Link] = []
        findings: list[Finding] = []
        if plan:
            self._say(f"measuring {len(plan)} connection{'s' if len(plan) > 1 else ''}, one at a time")
        for first, second, with_bandwidth in plan:
            if {first, second} & self._lost.keys():
                continue
            try:
                links.append(self._measure(first, second, with_bandwidth=with_bandwidth))
            except (ChannelError, ValueError) as error:
                if first == self._member.task:  # the questions went over the same connection
                    self._lost[second] = "its connection broke while it was measured"
                found = f"the connection of {first} and {second} could not be measured: {printable(error)}"
                expected = "a connection that carries large transfers as well as small ones"
                remedy = (
                    "Compare the MTU of both hosts and of what is between them (ip link; ping -M do -s 1472): small "
                    "messages passed. Look for lost packets (ip -s link)."
                )
                findings.append(Finding(ERROR, "links", found, expected, remedy))
        return links, findings

    def _measure(self, first: str, second: str, *, with_bandwidth: bool) -> Link:
        if first == self._member.task:
            return self._member.measure(second, with_bandwidth=with_bandwidth)
        channel = self._member.peers.all[first].channel
        if channel is None:
            raise ChannelError(f"{first} has not answered")
        answer = channel.ask(do="measure", peer=second, bandwidth=with_bandwidth, limit_seconds=_MEASURE_SECONDS)
        link = Link.from_json(answer)
        if (link.first, link.second) != (first, second):
            raise ValueError("another connection was measured")
        return link

    def _shared_directory(self) -> list[Finding]:
        directory, peers = self._member.situation.checkpoints, self._present()
        if directory is None or not peers:
            return []
        try:
            with marked(directory) as name:
                answers = {peer.task: self._ask(peer, do="look", name=name) for peer in peers}
        except OSError:
            return []  # that it cannot be written was found before
        seen = {task: answer.get("seen") for task, answer in answers.items() if answer is not None}
        blind = [task for task, sees in seen.items() if sees is False]
        if blind:
            found = f"{directory} of {', '.join(blind)} is another directory than that of {self._member.task}"
            remedy = "Mount one file system everywhere (NFS, Lustre, a shared volume), and name a directory in it."
            expected = "one directory for all workers: each writes its own part of a checkpoint"
            return [Finding(ERROR, "shared checkpoints", found, expected, remedy)]
        if not any(seen.values()):
            return []
        return [Finding(OK, "shared checkpoints", f"{directory} is the same directory on all tasks")]


def planned_pairs(tasks: Sequence[str]) -> list[tuple[str, str, bool]]:
    """Returns who measures the connection to whom, in order, and whether with its bandwidth.

    All pairs of a few tasks; of more, the neighbours in a ring, as gradients travel, and the round trip from the first
    task to all.

    >>> planned_pairs(["worker 0", "worker 1"])
    [('worker 0', 'worker 1', True)]
    >>> len(planned_pairs(list("abcdef")))
    9
    """
    if len(tasks) <= _ALL_PAIRS_TASKS:
        return [(first, second, True) for first, second in itertools.combinations(tasks, 2)]
    ring = [(tasks[0], tasks[1]), *itertools.pairwise(tasks[1:]), (tasks[0], tasks[-1])]
    others = [(tasks[0], task) for task in tasks[2:-1]]
    return [(*pair, True) for pair in ring] + [(*pair, False) for pair in others]
