"""What workers that called a function leave: files of values and errors, by attempt and rank; and the `WorkerError`."""

import dataclasses
import json
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist.cluster import PREEMPTED_EXIT_CODE
from tfdist.utils import atomic_files
from tfdist.utils.formatting import signal_name

FAILURE = "failure.json"
_STEM = re.compile(r"attempt-(\d+)/rank-(\d+)")
_PREEMPTED = "a signal announced a preemption, and the workers saved and left. Run the cell again to resume"


class WorkerError(RuntimeError):
    """A function that `from_notebook`, or the call of an engine, has called in workers has failed.

    >>> try:
    ...     raise WorkerError("Worker 1 of 2 failed: KeyError: 'x'", rank=1)
    ... except WorkerError as error:
    ...     error.rank, error.traceback
    (1, '')

    Attributes:
        rank: Rank of the worker that failed first, or None if no single worker did.
        traceback: Its traceback as text, or an empty string.
    """

    def __init__(self, message: str, *, rank: int | None = None, traceback: str = "") -> None:
        super().__init__(message)
        self.rank, self.traceback = rank, traceback


@dataclasses.dataclass(frozen=True)
class RankResult:
    """The result of one rank in one attempt. All are None if its process ended before it could write one."""

    value: bytes | None = None  # the pickled value
    pickling_error: dict[str, Any] | None = None  # `type` and `reason` of a value that cannot be pickled
    error: dict[str, Any] | None = None  # `type`, `message` and `traceback` of the exception that the function raised


def begin_attempt(directory: Path, attempt: int, rank: int) -> Path:
    """Records that an attempt has begun; returns the path of the rank's result, which `write_json` gives a suffix.

    A result is one file: a `.value`, the `.pickling-error` of one, or an `.error`; see `RankResult`.
    """
    stem = directory / f"attempt-{attempt}" / f"rank-{rank}"
    stem.parent.mkdir(exist_ok=True)
    return stem


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a file that appears complete or not at all."""
    with atomic_files.replacing(path, durable=False) as file:
        file.write(json.dumps(content).encode())


def read_results(directory: Path) -> dict[tuple[int, int], RankResult]:
    """Returns the results in a directory, by attempt and rank."""
    stems = {path.relative_to(directory).with_suffix("") for path in directory.glob("attempt-*/rank-*.*")}
    results = {}
    for stem in stems:
        if (match := _STEM.fullmatch(stem.as_posix())) is not None:
            path = directory / stem
            results[int(match[1]), int(match[2])] = RankResult(
                _read(path.with_suffix(".value")),
                _read_json(path.with_suffix(".pickling-error")),
                _read_json(path.with_suffix(".error")),
            )
    return results


def count_attempts(directory: Path) -> int:
    """Returns how many attempts have begun in which workers of this directory call the function."""
    return max((int(path.name.removeprefix("attempt-")) + 1 for path in directory.glob("attempt-*")), default=0)


def read_failure(directory: Path) -> dict[str, Any] | None:
    """Returns the launcher's error file of the last failed attempt (see `ErrorFile`), or None."""
    return _read_json(directory / FAILURE)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _read_json(path: Path) -> dict[str, Any] | None:
    content = _read(path)
    return None if content is None else dict(json.loads(content))


def _failed_worker(failure: Mapping[str, Any], error: Mapping[str, Any] | None, workers: int) -> WorkerError:
    cause, earlier = failure["cause"], failure["earlier"]
    rank, lines = cause["rank"], cause.get("last_lines") or []
    how = str(cause["description"]).removeprefix(f"worker {rank}: ")
    if error is not None:
        how = f"{error['type']}: {error['message']}" if error["message"] else error["type"]
    kind, _, number = str(cause.get("task") or f"worker {rank}").partition(" ")
    role_text = "The parameter server" if kind == "ps" else f"The {kind}"
    who = f"Worker {number} of {workers}" if kind == "worker" else f"{role_text} {number}".rstrip()
    who = "The workers" if rank is None else who
    text = [f"{who} failed: {how}"]
    if earlier:
        text.append(f"This was attempt {failure['attempt'] + 1}. Earlier attempts:")
        text += [f"  attempt {attempt['attempt'] + 1}: {attempt['cause']}" for attempt in earlier]
    if error is not None:
        text += ["", error["traceback"].rstrip("\n")]
    elif lines:
        text += ["Its last lines:", *(f"  {line}" for line in lines[-20:])]
    return WorkerError("\n".join(text), rank=rank, traceback="" if error is None else error["traceback"])


def _failed_launcher(exit_code: int, last_lines: tuple[str, ...]) -> WorkerError:
    """Returns the error for a launcher that ended without naming a failed worker.

    >>> print(_failed_launcher(-9, ()))
    The launcher of the workers ended: killed by SIGKILL
    """
    if exit_code == PREEMPTED_EXIT_CODE:
        how = _PREEMPTED
    elif exit_code < 0:
        how = f"killed by {signal_name(-exit_code)}"
    elif exit_code > 128:
        how = f"ended by {signal_name(exit_code - 128)}"
    else:
        how = f"exit code {exit_code}"
    return WorkerError("\n".join([f"The launcher of the workers ended: {how}", *(f"  {line}" for line in last_lines)]))


def values_by_rank(
    exit_code: int,
    failure: Mapping[str, Any] | None,
    results: Mapping[tuple[int, int], RankResult],
    *,
    calls: int,
    workers: int | None = None,
    may_lack_values: bool = False,
    last_lines: Sequence[str],
) -> list[Any]:
    """Returns the values of the last attempt of a run, or raises a WorkerError.

    `failure` is the launcher's error file, or None if it wrote none; `calls` says how many processes have called the
    function; `workers` how many workers there are, if others than those have called it. With `may_lack_values`, of an
    elastic run, the value of a worker that was lost and has not joined again is None, if others have returned one.
    """
    if exit_code != 0:
        if failure is None or exit_code == PREEMPTED_EXIT_CODE:
            raise _failed_launcher(exit_code, tuple(last_lines))
        failed = results.get((failure["attempt"], failure["cause"]["rank"]))
        raise _failed_worker(failure, None if failed is None else failed.error, workers or calls)
    attempt = max((attempt for attempt, _ in results), default=0)
    last_results = [results.get((attempt, rank), RankResult()) for rank in range(calls)]
    for rank, result in enumerate(last_results):
        if (reason := result.pickling_error) is not None:
            raise WorkerError(
                f"The value of worker {rank} cannot be sent back. Received: {reason['type']} ({reason['reason']}). "
                "Expected: a value that can be pickled, such as numbers, NumPy arrays, and lists and dictionaries of "
                "them. Return `model.get_weights()` or `history.history`, or save the model to a file and load it "
                "here.",
                rank=rank,
            )
        if result.value is None and not (may_lack_values and any(other.value is not None for other in last_results)):
            raise WorkerError(
                f"Worker {rank} returned nothing. Received: exit code 0 before the function had returned. Expected: a "
                "return or an exception. Remove `sys.exit()` and `os._exit()`.",
                rank=rank,
            )
    return [None if result.value is None else _loaded(rank, result.value) for rank, result in enumerate(last_results)]


def _loaded(rank: int, value: bytes) -> Any:
    try:
        return pickle.loads(value)
    except Exception as error:  # whatever a class does
        raise WorkerError(
            f"The value of worker {rank} cannot be read here. Received: {type(error).__name__}: {error}. Expected: a "
            "value whose classes this process can import and restore. Install their package here, or return numbers, "
            "NumPy arrays, and lists and dictionaries of them.",
            rank=rank,
        ) from error
