"""Findings of the checks, the report that collects them, and its form as JSON and as text."""

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import tfdist
from tfdist.doctor.check_context import CheckContext
from tfdist.doctor.compression_advice import Advice
from tfdist.doctor.link_measurement import LinkMeasurement
from tfdist.utils.formatting import (
    align_columns,
    counted,
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    printable,
)

OK, WARNING, ERROR = LEVELS = ("ok", "warning", "error")

FORMAT = 1
"""Version of the JSON document. It changes if a key changes or is removed; new keys do not change it."""

_COLUMNS = 100  # of the longest line
_LEVEL_COLUMNS = 9
_CHECK_COLUMNS = 20


@dataclasses.dataclass(frozen=True)
class Finding:
    """Result of a check, for example `Finding("warning", "open files", "1024", "at least 4096", "ulimit -n 4096")`."""

    # `"ok"`, `"warning"` (a training may run, but look at it) or `"error"` (a training fails, or does not run as
    # intended)
    level: str
    check: str  # name of the check, the same in every version, for example `"open files"`
    found: str  # what was found: a sentence or a few words
    expected: str = ""  # what was expected; empty if the level is `"ok"`
    remedy: str = ""  # what to do; empty if the level is `"ok"`
    task: str = ""  # task whose machine was checked, for example `"worker 1"`; empty for a finding about all tasks

    @classmethod
    def from_json(cls, document: object) -> "Finding":
        """Reads what another task sent, without control characters; raises a ValueError for anything else."""
        if not isinstance(document, dict) or document.get("level") not in LEVELS:
            raise ValueError("not a finding")
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: printable(document.get(name, "")) for name in names})

    def on(self, task: str) -> "Finding":
        return dataclasses.replace(self, task=task)


@dataclasses.dataclass(frozen=True)
class Report:
    """Findings of all tasks."""

    context: CheckContext  # what was checked
    findings: tuple[Finding, ...]
    # hostname of each task that has answered, this task first
    hosts: dict[str, str] = dataclasses.field(default_factory=dict)
    links: tuple[LinkMeasurement, ...] = ()  # measured connections
    advice: Advice | None = None  # suggestion for the measured network; None: nothing was measured

    @property
    def errors(self) -> int:
        return sum(finding.level == ERROR for finding in self.findings)

    @property
    def warnings(self) -> int:
        return sum(finding.level == WARNING for finding in self.findings)

    @property
    def worst_level(self) -> str:
        """The most severe level of the findings."""
        return max((finding.level for finding in self.findings), key=LEVELS.index, default=OK)

    def to_json(self) -> dict[str, Any]:
        """Returns the document of `tfdist doctor --json`; `docs/doctor.md` describes it."""
        config = self.context.config
        cluster = None
        if config is not None:
            cluster = {
                "source": config.source,
                "task": self.context.task,
                "addresses": self.context.addresses,
                "hosts": self.hosts,
            }
        return {
            "format": FORMAT,
            "tfdist": tfdist.__version__,
            "verdict": self.worst_level,
            "errors": self.errors,
            "warnings": self.warnings,
            "cluster": cluster,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "links": [dataclasses.asdict(link) for link in self.links],
            "compression": None if self.advice is None else dataclasses.asdict(self.advice),
        }


def to_text(report: Report) -> str:
    """Returns all findings of this task, and of the others, which may be many, those that are not ok."""
    return "\n".join(_lines(report))


def summary(errors: int, warnings: int) -> str:
    """Returns the numbers of errors and warnings.

    >>> summary(0, 1)
    '0 errors, 1 warning'
    """
    return f"{counted(errors, 'error')}, {counted(warnings, 'warning')}"


def _lines(report: Report) -> Iterator[str]:
    yield from (f"tfdist doctor {tfdist.__version__}", "")
    own_task = report.context.task
    tasks = list(report.context.addresses) or [own_task]
    if own_task not in tasks:
        tasks.insert(0, own_task)
    yield _heading(report, own_task)
    yield from _finding_lines(finding for finding in report.findings if finding.task == own_task)
    peer_findings = [finding for finding in report.findings if finding.task in tasks and finding.task != own_task]
    for task in dict.fromkeys(finding.task for finding in peer_findings):
        levels = [finding.level for finding in peer_findings if finding.task == task]
        yield f"{_heading(report, task)}: {levels.count(OK)} of {len(levels)} findings ok"
    yield from _finding_lines(_merged(finding for finding in peer_findings if finding.level != OK))
    about_all = [finding for finding in report.findings if finding.task not in tasks]
    if about_all and own_task:
        yield from ("", "all tasks")
        yield from _finding_lines(about_all)
    if report.links:
        yield from ("", *_link_lines(report.links))
    if report.advice is not None:
        yield from ("", *_advice_lines(report.advice))
    yield from ("", summary(report.errors, report.warnings))


def _merged(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yields equal findings of several tasks once, with the names of the tasks."""
    tasks: dict[Finding, list[str]] = {}
    for finding in findings:
        tasks.setdefault(finding.on(""), []).append(finding.task)
    for finding, names in tasks.items():
        yield dataclasses.replace(finding, found=f"{', '.join(names)}: {finding.found}")


def _heading(report: Report, task: str) -> str:
    if not task:
        return "this machine"
    host = report.hosts.get(task, "")
    address = report.context.addresses.get(task, "")
    return f"{task}{f' at {address}' if address else ''}{f' on {host}' if host else ''}"


def _finding_lines(findings: Iterable[Finding]) -> Iterator[str]:
    for finding in findings:
        level = finding.level if finding.level == OK else finding.level.upper()
        head = f"  {level:<{_LEVEL_COLUMNS}}{finding.check:<{_CHECK_COLUMNS}}"
        yield from _wrapped(head, finding.found)
        for label, text in (("expected: ", finding.expected), ("do: ", finding.remedy)):
            if text:
                yield from _wrapped(" " * len(head), label + text)


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _COLUMNS,
        initial_indent=head,
        subsequent_indent=" " * (2 + _LEVEL_COLUMNS + _CHECK_COLUMNS),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [head.rstrip()]


def _link_lines(links: Iterable[LinkMeasurement]) -> list[str]:
    rows = [["connections", "there", "back", "round trip", "clock ahead by"]]
    for link in links:
        rates = (link.bytes_per_second, link.bytes_per_second_back)
        sign = "-" if link.clock_offset_seconds < 0 else ""
        rows.append(
            [
                f"  {link.first} - {link.second}",
                *("-" if rate is None else format_rate(rate) for rate in rates),
                format_seconds(link.round_trip_seconds),
                f"{sign}{link.clock_offset_text}",
            ]
        )
    return align_columns(rows)


def _advice_lines(advice: Advice) -> Iterator[str]:
    rate, round_trip = format_rate(advice.bytes_per_second), format_seconds(advice.round_trip_seconds)
    yield (
        f"compression: one exchange of {format_count(advice.parameters)} parameters between {advice.workers} workers "
        f"at {rate}, {round_trip} per round trip"
    )
    rows = [["  method", "a worker sends", "takes at least"]]
    rows += [
        [f"  {exchange.method}", format_bytes(exchange.bytes_sent), format_seconds(exchange.seconds)]
        for exchange in advice.exchanges
    ]
    yield from align_columns(rows)
    name = "none" if advice.suggestion is None else f'compression="{advice.suggestion}"'
    text = f"suggested: {name}: {advice.reason}"
    yield from textwrap.wrap(text, _COLUMNS, initial_indent="  ", subsequent_indent="  ")
