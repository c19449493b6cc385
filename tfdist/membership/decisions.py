"""Who continues after a change, and with which step: a pure function of what the workers report.

A step is committed by a worker once every member of its view has said that it has all sums of the step. So where one
has committed, all have the sums; where one lacks them, none has committed.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

Ballot = tuple[int, int]
"""The number of a proposal and the worker that makes it. Later ones are larger."""


@dataclasses.dataclass(frozen=True, order=True)
class View:
    """The workers that train together.

    Attributes:
        ballot: The proposal by which they were chosen.
        members: Their numbers, in increasing order. The number of a process is never used again.
    """

    ballot: Ballot
    members: tuple[int, ...]

    @classmethod
    def of_json(cls, value: Any) -> "View":
        """Returns the view of what `json` has made of `dataclasses.asdict`."""
        return cls((int(value["ballot"][0]), int(value["ballot"][1])), tuple(map(int, value["members"])))


NO_VIEW = View((0, 0), ())
"""The view of a worker that does not train yet."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What a worker answers to a proposal. From then on it commits nothing in its view.

    Attributes:
        view: Its view.
        attempts: Later views that it has accepted, and that may have begun elsewhere.
        committed: The last step that it has committed.
        is_ready: Whether it has all sums of the next step.
        ended: Workers whose process has certainly ended.
        silent: Workers that it does not reach at the moment.
    """

    view: View
    attempts: tuple[View, ...] = ()
    committed: int = 0
    is_ready: bool = False
    ended: frozenset[int] = frozenset()
    silent: frozenset[int] = frozenset()

    @property
    def proved_ends(self) -> frozenset[int]:
        """Those of `ended` that count: a member has received `exclude` before, if they had left it out."""
        return frozenset() if self.view == NO_VIEW else self.ended

    def as_json(self) -> dict[str, Any]:
        """Returns what `of_json` reads."""
        return {**dataclasses.asdict(self), "ended": sorted(self.ended), "silent": sorted(self.silent)}

    @classmethod
    def of_json(cls, value: Any) -> "Report":
        """Returns the report of what `json` has made of `as_json`."""
        return cls(
            View.of_json(value["view"]),
            tuple(map(View.of_json, value["attempts"])),
            int(value["committed"]),
            bool(value["is_ready"]),
            frozenset(map(int, value["ended"])),
            frozenset(map(int, value["silent"])),
        )


@dataclasses.dataclass(frozen=True)
class Decision:
    """The next view, and the last step that all its members commit before they begin in it."""

    view: View
    step: int


@dataclasses.dataclass(frozen=True)
class NoMajority:
    """Why nothing can be decided: others may continue without those who report.

    Attributes:
        members: A view that may train.
        present: Those of them that report, and reach each other.
        ended: Those of them whose process has ended.
    """

    members: tuple[int, ...]
    present: tuple[int, ...]
    ended: tuple[int, ...]


def decide(ballot: Ballot, reports: Mapping[int, Report]) -> Decision | NoMajority:
    """Decides who trains on.

    Those who reach each other continue if they hold a majority of the last view, and of every later one that may have
    begun; or half of it with its oldest worker (dynamic voting: Yeger Lotem, Keidar, Dolev, PODC 1997); or if they are
    all that have not ended. While another one is silent, who has ended counts: the two may have begun a view before.
    A step is committed if all of them have its sums; otherwise it is computed again.

    Args:
        ballot: The ballot of the proposal.
        reports: What the workers have answered, by their numbers.

    >>> old = View((1, 0), (0, 1, 2))
    >>> decide((2, 1), {1: Report(old, committed=7), 2: Report(old, committed=6, is_ready=True)})
    Decision(view=View(ballot=(2, 1), members=(1, 2)), step=7)
    >>> decide((2, 1), {1: Report(old, committed=7)})
    NoMajority(members=(0, 1, 2), present=(1,), ended=())
    >>> decide((2, 1), {1: Report(old, committed=7, ended=frozenset([0, 2]))})
    Decision(view=View(ballot=(2, 1), members=(1,)), step=7)
    >>> decide((2, 0), {0: Report(old, committed=7, ended=frozenset([2]))})
    NoMajority(members=(0, 1, 2), present=(0,), ended=(2,))
    """
    ended = frozenset().union(*(report.proved_ends for report in reports.values()))
    chosen = _reach_each_other({number: report for number, report in reports.items() if number not in ended})
    trained = {number: reports[number] for number in chosen if reports[number].view != NO_VIEW}
    latest = max((report.view for report in reports.values()), default=NO_VIEW)
    step = max((report.committed for report in trained.values()), default=0)
    trained = {number: report for number, report in trained.items() if report.committed + report.is_ready >= step}
    joins = [number for number in chosen if reports[number].view == NO_VIEW]
    if trained and all(report.view == latest and _has_next(report, step) for report in trained.values()):
        step += 1
    if any(report.committed < step for report in trained.values()):
        # They commit this step in the next view, and workers that join cannot have it before.
        joins = [number for number in joins if reports[number].committed >= step]
    attempts = {attempt for report in reports.values() for attempt in report.attempts if attempt > latest}
    for view in [latest, *sorted(attempts)]:
        counted = [number for number in view.members if number not in ended]
        present = [number for number in counted if number in trained or number in joins]
        if len(present) < len(counted) and not _is_quorum(present, view.members):
            gone = tuple(number for number in view.members if number in ended)
            return NoMajority(view.members, tuple(present), gone)
    return Decision(View(ballot, tuple(sorted([*trained, *joins]))), step)


def _has_next(report: Report, step: int) -> bool:
    return report.committed == step and report.is_ready


def _reach_each_other(reports: Mapping[int, Report]) -> list[int]:
    """Chooses from the oldest on; workers that join are chosen last: they replace nobody who trains."""
    chosen: list[int] = []
    for number in sorted(reports, key=lambda number: (reports[number].view == NO_VIEW, number)):
        silent = reports[number].silent
        if not any(other in silent or number in reports[other].silent for other in chosen):
            chosen.append(number)
    return chosen


def _is_quorum(present: Collection[int], members: Collection[int]) -> bool:
    has_half = 2 * len(present) == len(members) and min(members) in present
    return 2 * len(present) > len(members) or has_half
