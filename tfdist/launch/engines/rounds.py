"""Rounds: all places of a call at once. When places are lost, the driver asks the engine for another round."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.launch.engines.engine_call import EngineCall
from tfdist.launch.engines.place import PlaceResult
from tfdist.launch.function_call.worker_results import WorkerError, values_by_rank
from tfdist.utils.argument_checks import UsageError
from tfdist.utils.formatting import counted, signal_name

# How often another process may take the port of the rendezvous in the second between its choice and its use.
_MAX_LOST_PORTS = 3
_LOST_PORT = "The coordinator cannot listen."


class LostPlaceError(Exception):
    """The engine has lost places of a round; the others have been stopped."""

    def __init__(self, message: str, results: Sequence[PlaceResult] = ()) -> None:
        super().__init__(message)
        self.results = tuple(results)


def run_rounds(
    call: EngineCall,
    run_round: Callable[[EngineCall], Sequence[PlaceResult]],
    *,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> list[Any]:
    """Runs rounds until one ends by the function, and returns its values by rank.

    Args:
        call: What to call.
        run_round: Asks the engine for places, runs the call in them, and returns their results. It raises
            `LostPlaceError` if the engine has lost places, after stopping the others.
        say: Shows the user why there is another round.

    Raises:
        WorkerError: If the function has failed, or places were lost more often than `max_restarts` allows.
        UsageError: If the launcher rejects an option.
    """
    lost_ports = 0
    while True:
        try:
            results = run_round(call)
            lost = _interruption(results)
        except LostPlaceError as error:
            results, lost = error.results, str(error)
        if any(result.usage_error.startswith(_LOST_PORT) for result in results) and lost_ports < _MAX_LOST_PORTS:
            lost_ports += 1
            say("tfdist: another process has taken the port of the rendezvous; starting again with another one")
            call = call.next_round(call.spec.max_restarts)
            continue
        for result in results:
            if result.usage_error:
                raise UsageError(result.usage_error)
        if not lost:
            return _values(call, results)
        restarts_left = call.spec.max_restarts - max([1, *(result.used_attempts for result in results)])
        if restarts_left < 0:
            raise WorkerError(
                f"A place of the workers was lost, and no restart is left. Received: {lost}. Expected: places that "
                "last until the function returns. Give `max_restarts`, with FailureRecovery in the function, to "
                "continue in other places."
            )
        say(f"tfdist: {lost}; restarting in new places ({counted(restarts_left, 'restart')} left)")
        call = call.next_round(restarts_left)


def _interruption(results: Sequence[PlaceResult]) -> str:
    """Returns why the round ended, if it did not end by the function, or an empty string."""
    interrupted = [result for result in results if result.is_interrupted]
    if not interrupted:
        return ""
    if killed := [result for result in interrupted if result.is_killed]:
        return ", ".join(f"the launcher of place {result.rank} was ended by {_signal_of(result)}" for result in killed)
    names = ", ".join(f"place {result.rank}" for result in interrupted)
    lines = [line.removeprefix("tfdist: ") for line in interrupted[0].last_lines]
    return f"{names} left before the function returned" + (f" ({lines[-1]})" if lines else "")


def _signal_of(result: PlaceResult) -> str:
    return signal_name(-result.exit_code if result.exit_code < 0 else result.exit_code - 128)


def _values(call: EngineCall, results: Sequence[PlaceResult]) -> list[Any]:
    merged = {key: rank_result for result in results for key, rank_result in result.results.items()}
    failed = [result for result in results if result.exit_code != 0]
    # All nodes write the same error file; a place that only lost its peers may have none.
    described = next((result for result in failed if result.failure is not None), (failed or results)[0])
    return values_by_rank(
        described.exit_code,
        described.failure,
        merged,
        calls=call.spec.calls,
        workers=call.spec.workers,
        last_lines=described.last_lines,
    )
