"""Formats a report for people, in aligned lines of at most 100 columns."""

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator

import tfdist
from tfdist.doctor.compression_advice import Advice
from tfdist.doctor.link_measurement import LinkMeasurement
from tfdist.doctor.report import OK, Finding, Report
from tfdist.utils.formatting import align_columns, format_bytes, format_rate, format_seconds

_COLUMNS = 100
_LEVEL_COLUMNS = 9
_CHECK_COLUMNS = 20


def to_text(report: Report) -> str:
    """Returns the report.

    The report shows all findings of this task, and of the other tasks those that are not ok: there may be many tasks.
    """
    return "\n".join(_lines(report))


def summary(errors: int, warnings: int) -> str:
    """Returns the numbers of errors and warnings.

    >>> summary(0, 1)
    '0 errors, 1 warning'
    """
    return f"{errors} error{'' if errors == 1 else 's'}, {warnings} warning{'' if warnings == 1 else 's'}"


def _lines(report: Report) -> Iterator[str]:
    yield from (f"tfdist doctor {tfdist.__version__}", "")
    own = report.context.task
    tasks = list(report.context.addresses) or [own]
    if own not in tasks:
        tasks.insert(0, own)
    yield _heading(report, own)
    yield from _finding_lines(finding for finding in report.findings if finding.task == own)
    others = [finding for finding in report.findings if finding.task in tasks and finding.task != own]
    for task in dict.fromkeys(finding.task for finding in others):
        levels = [finding.level for finding in others if finding.task == task]
        yield f"{_heading(report, task)}: {levels.count(OK)} of {len(levels)} findings ok"
    yield from _finding_lines(_merged(finding for finding in others if finding.level != OK))
    about_all = [finding for finding in report.findings if finding.task not in tasks]
    if about_all and own:
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
        offset, uncertainty = map(format_seconds, (abs(link.clock_offset_seconds), link.clock_uncertainty_seconds))
        rows.append(
            [
                f"  {link.first} - {link.second}",
                *("-" if rate is None else format_rate(rate) for rate in rates),
                format_seconds(link.round_trip_seconds),
                f"{sign}{offset} (± {uncertainty})",
            ]
        )
    return align_columns(rows)


def _advice_lines(advice: Advice) -> Iterator[str]:
    yield f"compression: {advice.headline()}"
    rows = [["  method", "a worker sends", "takes at least"]]
    rows += [[f"  {x.method}", format_bytes(x.bytes_sent), format_seconds(x.seconds)] for x in advice.exchanges]
    yield from align_columns(rows)
    name = "none" if advice.suggestion is None else f'compression="{advice.suggestion}"'
    text = f"suggested: {name}: {advice.reason}"
    yield from textwrap.wrap(text, _COLUMNS, initial_indent="  ", subsequent_indent="  ")
