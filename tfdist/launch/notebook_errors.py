"""What `from_notebook` raises when its workers have not ended well, and what that says."""

from collections.abc import Mapping
from typing import Any

from tfdist.launch.failure import signal_name

_PREEMPTED = "the workers were told to end; they saved and left. Run the cell again to go on"


class WorkerError(RuntimeError):
    """A function that was sent to workers has failed in one of them.

    >>> try:
    ...     raise WorkerError("Worker 1 of 2 failed: KeyError: 'x'", rank=1)
    ... except WorkerError as error:
    ...     error.rank, error.traceback
    (1, '')

    Attributes:
        rank: Of the worker that failed first, or None where that is no single one.
        traceback: Its traceback as text, or an empty string.
    """

    def __init__(self, message: str, *, rank: int | None = None, traceback: str = "") -> None:
        super().__init__(message)
        self.rank, self.traceback = rank, traceback


def failed_worker(failure: Mapping[str, Any], error: Mapping[str, Any] | None, workers: int) -> WorkerError:
    """Returns the error that tells of the failure of an attempt.

    Args:
        failure: What the launcher says (`error_file.describe`).
        error: What the worker says that failed first, or None where it could not.
        workers: How many there are.
    """
    cause, earlier = failure["cause"], failure["earlier"]
    rank, lines = cause["rank"], cause.get("last_lines") or []
    how = str(cause["description"]).removeprefix(f"worker {rank}: ")
    if error is not None:
        how = f"{error['type']}: {error['message']}" if error["message"] else error["type"]
    who = "The workers" if rank is None else f"Worker {rank} of {workers}"
    text = [f"{who} failed: {how}"]
    if earlier:
        text.append(f"It was attempt {failure['attempt'] + 1}. Before:")
        text += [f"  attempt {before['attempt'] + 1}: {before['cause']}" for before in earlier]
    if error is not None:
        text += ["", error["traceback"].rstrip("\n")]
    elif lines:
        text += ["Its last lines:", *(f"  {line}" for line in lines[-20:])]
    return WorkerError("\n".join(text), rank=rank, traceback="" if error is None else error["traceback"])


def unsent_value(rank: int, refusal: Mapping[str, Any]) -> WorkerError:
    """Returns the error for a value that cannot come back.

    >>> print(unsent_value(1, {"type": "Sequential", "reason": "it is a keras.Model"}))
    The value of worker 1 cannot be sent back. Received: Sequential (it is a keras.Model). Expected: ...
    """
    return WorkerError(
        f"The value of worker {rank} cannot be sent back. Received: {refusal['type']} ({refusal['reason']}). "
        "Expected: what can be pickled, such as numbers, NumPy arrays, and lists and dictionaries of them. Return "
        "`model.get_weights()` or `history.history`, or save the model to a file and load it here.",
        rank=rank,
    )


def no_value(rank: int) -> WorkerError:
    """Returns the error for a worker that ended well, but not by a return of the function."""
    return WorkerError(
        f"Worker {rank} returned nothing. Received: exit code 0 before the function had returned. Expected: a return, "
        "or an exception. Leave out `sys.exit()` and `os._exit()`.",
        rank=rank,
    )


def failed_launcher(exit_code: int, last_words: tuple[str, ...]) -> WorkerError:
    """Returns the error for a launcher that has ended without saying which worker failed.

    >>> print(failed_launcher(-9, ()))
    The launcher of the workers ended: killed by SIGKILL
    """
    if exit_code == 75:
        how = _PREEMPTED
    elif exit_code < 0:
        how = f"killed by {signal_name(-exit_code)}"
    elif exit_code > 128:
        how = f"told to end by {signal_name(exit_code - 128)}"
    else:
        how = f"exit code {exit_code}"
    return WorkerError("\n".join([f"The launcher of the workers ended: {how}", *(f"  {line}" for line in last_words)]))
