"""The report for people: plain aligned lines of at most 100 columns."""

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator

import tfdist
from tfdist.doctor.advice import Advice, describe
from tfdist.doctor.finding import OK, Finding
from tfdist.doctor.link import Link
from tfdist.doctor.report import Report
from tfdist.doctor.units import format_bytes, format_rate, format_seconds

_COLUMNS = 100
_LEVEL_COLUMNS = 9
_CHECK_COLUMNS = 20


def to_text(report: Report) -> str:
    """Returns the report.

    This task's findings are shown in full. Of the other tasks only those that are not ok are: there may be many.
    """
    return "\n".join(_lines(report))


def summary(errors: int, warnings: int) -> str:
    """Returns how many there are.

    >>> summary(0, 1)
    '0 errors, 1 warning'
    """
    return f"{errors} error{'' if errors == 1 else 's'}, {warnings} warning{'' if warnings == 1 else 's'}"


def _lines(report: Report) -> Iterator[str]:
    yield from (f"tfdist doctor {tfdist.__version__}", "")
    own = report.situation.task
    tasks = list(report.situation.addresses) or [own]
    if own not in tasks:
        tasks.insert(0, own)
    yield _name(report, own)
    yield from _table(finding for finding in report.findings if finding.task == own)
    others = [finding for finding in report.findings if finding.task in tasks and finding.task != own]
    for task in dict.fromkeys(finding.task for finding in others):
        levels = [finding.level for finding in others if finding.task == task]
        yield f"{_name(report, task)}: {levels.count(OK)} of {len(levels)} findings ok"
    yield from _table(_merged(finding for finding in others if finding.level != OK))
    about_all = [finding for finding in report.findings if finding.task not in tasks]
    if about_all and own:
        yield from ("", "all tasks")
        yield from _table(about_all)
    if report.links:
        yield from ("", *_links(report.links))
    if report.advice is not None:
        yield from ("", *_advice(report.advice))
    yield from ("", summary(report.errors, report.warnings))


def _merged(findings: Iterable[Finding]) -> Iterator[Finding]:
    tasks: dict[Finding, list[str]] = {}
    for finding in findings:
        tasks.setdefault(finding.on(""), []).append(finding.task)
    for finding, where in tasks.items():
        yield dataclasses.replace(finding, found=f"{', '.join(where)}: {finding.found}")


def _name(report: Report, task: str) -> str:
    if not task:
        return "this machine"
    host = report.hosts.get(task, "")
    address = report.situation.addresses.get(task, "")
    return f"{task}{f' at {address}' if address else ''}{f' on {host}' if host else ''}"


def _table(findings: Iterable[Finding]) -> Iterator[str]:
    for finding in findings:
        is_ok = finding.level == OK
        level = finding.level if is_ok else finding.level.upper()
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


def _links(links: Iterable[Link]) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("connections", "there", "back", "round trip", "clock ahead by")]
    for link in links:
        rates = (link.bytes_per_second, link.bytes_per_second_back)
        rows.append(
            (
                f"  {link.first} - {link.second}",
                *("-" if rate is None else format_rate(rate) for rate in rates),
                format_seconds(link.round_trip_seconds),
                f"{'-' if link.clock_offset_seconds < 0 else ''}{format_seconds(abs(link.clock_offset_seconds))} "
                f"(± {format_seconds(link.clock_uncertainty_seconds)})",
            )
        )
    return _aligned(rows)


def _advice(advice: Advice) -> Iterator[str]:
    yield f"compression: {describe(advice)}"
    rows: list[tuple[str, ...]] = [("  method", "a worker sends", "takes at least")]
    rows += [(f"  {x.method}", format_bytes(x.bytes_sent), format_seconds(x.seconds)) for x in advice.exchanges]
    yield from _aligned(rows)
    name = "none" if advice.suggestion is None else f'compression="{advice.suggestion}"'
    yield from textwrap.wrap(
        f"suggested: {name}: {advice.reason}", _COLUMNS, initial_indent="  ", subsequent_indent="  "
    )


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        padded = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield "  ".join([name.ljust(widths[0]), *padded])
