"""The outcome of an attempt on one host, as a message; and those of all hosts, as one."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfdist.launch.failure import WorkerEnd
from tfdist.launch.outcome import Outcome

_MAX_BYTES = 2**20
_MAX_LINE = 2000


def encode(outcome: Outcome) -> dict[str, Any]:
    """Returns what a host tells of its workers. Where that is long, fewer of their last lines are told.

    Args:
        outcome: Of this host; ranks count over all hosts.
    """
    kept = 200
    while True:
        ends = [_encode_end(end, kept) for end in outcome.ends]
        if kept <= 1 or len(json.dumps(ends)) <= _MAX_BYTES:
            break
        kept //= 2
    return {
        "workers": outcome.workers,
        "ends": ends,
        "stall": outcome.stall,
        "unstarted": None if outcome.unstarted is None else [outcome.unstarted[0], str(outcome.unstarted[1])],
        "heard": sorted(outcome.heard),
        "fit": outcome.fit,
        "step": outcome.step,
        "saved": outcome.saved,
        "errors": [[rank, dict(error)] for rank, error in outcome.errors.items()],
    }


def decode(said: Mapping[str, Any], host: str) -> Outcome:
    """Reads it.

    Args:
        said: What `encode` has made.
        host: The host that tells it.

    Raises:
        ValueError: If it is nothing of the kind. So are KeyError and TypeError.
    """
    unstarted = said["unstarted"]
    return Outcome(
        attempt=0,
        workers=int(said["workers"]),
        ends=tuple(_decode_end(end, host) for end in said["ends"]),
        stall=str(said["stall"]),
        unstarted=None if unstarted is None else (int(unstarted[0]), OSError(str(unstarted[1]))),
        heard=frozenset(int(rank) for rank in said["heard"]),
        fit=int(said["fit"]),
        step=_optional(said["step"]),
        saved=_optional(said["saved"]),
        errors={int(rank): {str(key): str(value) for key, value in error.items()} for rank, error in said["errors"]},
    )


def merge(outcomes: Sequence[Outcome], **more: Any) -> Outcome:
    """Returns the outcome of all hosts.

    Args:
        outcomes: Those of the hosts, the host that failed first before the others.
        more: Fields of the outcome that no host alone knows.
    """
    fit = max((outcome.fit for outcome in outcomes), default=1)
    furthest = [outcome for outcome in outcomes if outcome.fit == fit]
    return Outcome(
        ends=tuple(end for outcome in outcomes for end in outcome.ends),
        stall=next((outcome.stall for outcome in outcomes if outcome.stall), ""),
        unstarted=next((outcome.unstarted for outcome in outcomes if outcome.unstarted is not None), None),
        heard=frozenset().union(*(outcome.heard for outcome in outcomes)),
        fit=fit,
        step=_highest(outcome.step for outcome in furthest),
        saved=_highest(outcome.saved for outcome in furthest),
        errors={rank: error for outcome in outcomes for rank, error in outcome.errors.items()},
        **more,
    )


def _encode_end(end: WorkerEnd, kept: int) -> dict[str, Any]:
    return {
        "rank": end.rank,
        "returncode": end.returncode,
        "last_lines": [line[:_MAX_LINE] for line in end.last_lines[-kept:]],
        "was_told": end.was_told,
        "verdict": end.verdict,
        "at": end.at,
    }


def _decode_end(said: Mapping[str, Any], host: str) -> WorkerEnd:
    return WorkerEnd(
        int(said["rank"]),
        int(said["returncode"]),
        tuple(str(line) for line in said["last_lines"]),
        was_told=bool(said["was_told"]),
        verdict=str(said["verdict"]),
        at=float(said["at"]),
        host=host,
    )


def _optional(number: Any) -> int | None:
    return None if number is None else int(number)


def _highest(numbers: Iterable[int | None]) -> int | None:
    return max((number for number in numbers if number is not None), default=None)
