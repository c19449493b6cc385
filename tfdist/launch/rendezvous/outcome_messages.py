"""Encodes a node's outcome of an attempt as a message, and merges the outcomes of all nodes."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfdist.launch.restart.attempt_outcome import Outcome
from tfdist.launch.restart.worker_exit import WorkerExit

_MAX_BYTES = 2**20
_MAX_LINES = 200
_MAX_LINE_CHARACTERS = 2000


def encode(outcome: Outcome) -> dict[str, Any]:
    """Returns the message for an outcome. A long message has fewer of the workers' last lines.

    Args:
        outcome: The outcome of this node; its ranks are those of the run.
    """
    lines = _MAX_LINES
    while True:
        exits = [_encode_exit(worker_exit, lines) for worker_exit in outcome.exits]
        if lines <= 1 or len(json.dumps(exits)) <= _MAX_BYTES:
            break
        lines //= 2
    start_failure = outcome.start_failure
    return {
        "workers": outcome.workers,
        "exits": exits,
        "stall": outcome.stall,
        "start_failure": None if start_failure is None else [start_failure[0], str(start_failure[1])],
        "heartbeat_ranks": sorted(outcome.heartbeat_ranks),
        "fit": outcome.fit,
        "step": outcome.step,
        "saved": outcome.saved,
        "errors": [[rank, dict(error)] for rank, error in outcome.errors.items()],
    }


def decode(message: Mapping[str, Any], host: str) -> Outcome:
    """Returns the outcome of a message.

    Args:
        message: What `encode` returned.
        host: Hostname of the sender.

    Raises:
        ValueError: If the message is malformed. KeyError and TypeError mean the same.
    """
    start_failure = message["start_failure"]
    errors = message["errors"]
    return Outcome(
        attempt=0,
        workers=int(message["workers"]),
        exits=tuple(_decode_exit(worker_exit, host) for worker_exit in message["exits"]),
        stall=str(message["stall"]),
        start_failure=None if start_failure is None else (int(start_failure[0]), OSError(str(start_failure[1]))),
        heartbeat_ranks=frozenset(int(rank) for rank in message["heartbeat_ranks"]),
        fit=int(message["fit"]),
        step=_optional_int(message["step"]),
        saved=_optional_int(message["saved"]),
        errors={int(rank): {str(key): str(value) for key, value in error.items()} for rank, error in errors},
    )


def merge(outcomes: Sequence[Outcome], **more: Any) -> Outcome:
    """Returns one outcome for all nodes.

    Args:
        outcomes: Outcomes of the nodes, that of the node that failed first in front.
        more: Fields that no single node knows.
    """
    fit = max((outcome.fit for outcome in outcomes), default=1)
    furthest = [outcome for outcome in outcomes if outcome.fit == fit]
    return Outcome(
        exits=tuple(worker_exit for outcome in outcomes for worker_exit in outcome.exits),
        stall=next((outcome.stall for outcome in outcomes if outcome.stall), ""),
        start_failure=next((outcome.start_failure for outcome in outcomes if outcome.start_failure is not None), None),
        heartbeat_ranks=frozenset().union(*(outcome.heartbeat_ranks for outcome in outcomes)),
        fit=fit,
        step=_highest(outcome.step for outcome in furthest),
        saved=_highest(outcome.saved for outcome in furthest),
        errors={rank: error for outcome in outcomes for rank, error in outcome.errors.items()},
        **more,
    )


def _encode_exit(worker_exit: WorkerExit, lines: int) -> dict[str, Any]:
    return {
        "rank": worker_exit.rank,
        "returncode": worker_exit.returncode,
        "last_lines": [line[:_MAX_LINE_CHARACTERS] for line in worker_exit.last_lines[-lines:]],
        "was_signalled": worker_exit.was_signalled,
        "failure_reason": worker_exit.failure_reason,
        "at": worker_exit.at,
    }


def _decode_exit(message: Mapping[str, Any], host: str) -> WorkerExit:
    return WorkerExit(
        int(message["rank"]),
        int(message["returncode"]),
        tuple(str(line) for line in message["last_lines"]),
        was_signalled=bool(message["was_signalled"]),
        failure_reason=str(message["failure_reason"]),
        at=float(message["at"]),
        host=host,
    )


def _optional_int(number: Any) -> int | None:
    return None if number is None else int(number)


def _highest(numbers: Iterable[int | None]) -> int | None:
    return max((number for number in numbers if number is not None), default=None)
