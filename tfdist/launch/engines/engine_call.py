"""The call of a function on the workers of an engine: what the user asked for, what each place does, and its rounds.

A round is all places of a call at once. When places are lost, the driver asks the engine for another round.
"""

import dataclasses
import hashlib
import math
import os
import platform
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tfdist
from tfdist.cluster import LOST_RUN_EXIT_CODE, PREEMPTED_EXIT_CODE, new_seed
from tfdist.launch.function_call.function_pickling import check_function, import_cloudpickle, pickle_call
from tfdist.launch.function_call.worker_results import RankResult, WorkerError, values_by_rank
from tfdist.launch.run_spec import START_TIMEOUT_SECONDS, NodeOptions, RunSpec
from tfdist.utils.argument_checks import UsageError, check_seconds
from tfdist.utils.formatting import counted, signal_name

# Exit codes of a launcher whose place has announced its end, or has lost the others.
_LEFT = (PREEMPTED_EXIT_CODE, LOST_RUN_EXIT_CODE)
# How often another process may take the port of the rendezvous in the second between its choice and its use.
_MAX_LOST_PORTS = 3
STOP_SECONDS = 10.0
"""How long a place has to end after the grace period."""
_LOST_PORT = "The coordinator cannot listen."


@dataclasses.dataclass(frozen=True)
class PlaceAddress:
    """Where a place is."""

    host: str  # its address, at which all other places reach it
    port: int  # a TCP port that was free there; place 0's is that of the rendezvous
    pid: int = 0  # the process of the engine; 0: unknown


@dataclasses.dataclass(frozen=True)
class PlaceTask:
    """What one place does."""

    run: str  # identifies the round, to stop it
    rank: int  # number of the place
    call: bytes = dataclasses.field(repr=False)  # the pickled call
    arguments: tuple[str, ...]  # arguments of `tfdist`, without the program's name, paths of the place, and script
    token: str = dataclasses.field(repr=False)  # the secret of the rendezvous
    grace_seconds: float  # seconds from SIGTERM to SIGKILL
    versions: "Versions"  # the versions of the driver
    host: str = ""  # the address of the place
    is_elastic: bool = False  # whether the others train on when the place is lost, and it may start again there


class Versions(NamedTuple):
    """What the driver and the places must have in common, so that a function can be sent."""

    python: str  # Python's version, without its last part
    cloudpickle: str  # the first part of cloudpickle's version
    tfdist: str  # the version of tfdist

    @classmethod
    def of_this_process(cls) -> "Versions":
        python = ".".join(platform.python_version_tuple()[:2])
        return cls(python, import_cloudpickle().__version__.partition(".")[0], tfdist.__version__)

    def __str__(self) -> str:
        return f"Python {self.python}, cloudpickle {self.cloudpickle}, tfdist {self.tfdist}"


@dataclasses.dataclass(frozen=True)
class PlaceResult:
    """How a round ended in a place."""

    rank: int  # number of the place
    exit_code: int  # exit code of the launcher; negative: the signal that killed it
    results: dict[tuple[int, int], RankResult]  # the results of the workers of this place, by attempt and rank
    failure: dict[str, Any] | None  # the launcher's error file of the last failed attempt, or None
    last_lines: tuple[str, ...]  # what the launcher said last
    usage_error: str = ""  # the launcher's message about a wrong command, or an empty string
    attempts: int = 0  # number of attempts that have begun; 0 if the function is called in other places only
    is_absent: bool = False  # whether it was lost and could not join the others of an elastic call again

    @property
    def is_interrupted(self) -> bool:
        """Whether the round ended because a place was lost or announced its end, not by the function."""
        return (self.is_killed or self.exit_code in _LEFT) and not self._is_exit_of_worker

    @property
    def is_lost(self) -> bool:
        """Whether the other places of an elastic call train on: the launcher was killed, or has not found them."""
        is_killed = self.exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL)
        return self.is_absent or (self.is_interrupted and is_killed)

    @property
    def is_killed(self) -> bool:
        """Whether a signal has ended the launcher, or its worker, whose exit code it then has."""
        return self.exit_code < 0 or self.exit_code > 128

    @property
    def used_attempts(self) -> int:
        """Number of attempts of this round that have failed or begun."""
        return max(self.attempts, 0 if self.failure is None else int(self.failure["attempt"]) + 1)

    @property
    def ends_round(self) -> bool:
        """Whether the engine's adapter has to stop the other places.

        The launcher was killed, has left, or has rejected its command; the others would wait for it until
        `start_timeout_seconds`.
        """
        return self.is_interrupted or bool(self.usage_error)

    @property
    def _is_exit_of_worker(self) -> bool:
        if self.failure is None or int(self.failure["attempt"]) + 1 < self.attempts:
            return False
        cause = self.failure["cause"]
        matches_cause = cause.get("exit_code") == self.exit_code or cause.get("signal") == signal_name(
            self.exit_code - 128
        )
        return matches_cause and self.exit_code != PREEMPTED_EXIT_CODE


@dataclasses.dataclass(frozen=True)
class EngineCall:
    """The call of a function on the workers of an engine."""

    payload: bytes = dataclasses.field(repr=False)  # the pickled call
    spec: RunSpec  # the run on all places, each of which is a host with one of the workers
    # the secret of the rendezvous
    token: str = dataclasses.field(default_factory=lambda: secrets.token_hex(16), repr=False)
    # names the call in its places and in the engine; no secret
    name: str = dataclasses.field(default_factory=lambda: secrets.token_hex(4))
    round: int = 0  # number of the round, from 0
    versions: Versions = dataclasses.field(default_factory=Versions.of_this_process)  # the versions of the driver

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        *,
        caller: str,
        start_timeout_seconds: Any = START_TIMEOUT_SECONDS,
        **options: Any,
    ) -> "EngineCall":
        """Checks the arguments of `caller`, such as "on_ray", and pickles the call. All rounds have the same seed."""
        check_function(function, caller=caller)
        check_seconds("start_timeout_seconds", start_timeout_seconds)  # the places have other defaults
        spec = RunSpec.of_call(start_timeout_seconds=start_timeout_seconds, **options)
        if spec.elastic is not None and spec.elastic > spec.workers:
            raise ValueError(
                "The least number of workers that train exceeds the number of workers. Received: workers="
                f"{spec.workers}, elastic={spec.elastic}. Expected: elastic={spec.workers}, or less. Correct one of "
                "them."
            )
        spec = dataclasses.replace(
            spec,
            seed=new_seed(os.environ) if spec.seed is None else spec.seed,
            log_dir=None if spec.log_dir is None else Path(spec.log_dir).absolute(),
        )
        return cls(pickle_call(function, arguments), spec)

    @property
    def run(self) -> str:
        """Identifies the round in the places."""
        return f"{self.name}-{self.round}"

    @property
    def likely_port(self) -> int:
        """A port for the rendezvous, below those that Linux gives clients, where the places do not report a free one.

        If a process has it, the call starts another round, with another port.
        """
        return 20_000 + int.from_bytes(hashlib.sha256(self.run.encode()).digest()[:4], "big") % 12_000

    def next_round(self, max_restarts: int) -> "EngineCall":
        """Returns the call for another round, with so many restarts left."""
        spec = dataclasses.replace(self.spec, max_restarts=max_restarts)
        return dataclasses.replace(self, spec=spec, round=self.round + 1)

    def task(self, rank: int, addresses: Sequence[PlaceAddress], *, threads: int | None = None) -> PlaceTask:
        """Returns what a place does. `threads` are the cores that the engine gives each place, if that is known."""
        spec, rendezvous = self.spec, addresses[0]
        log_dir = spec.log_dir
        if log_dir is not None and self.round:
            # A launcher empties its files; those of earlier rounds say why there is another.
            log_dir = Path(log_dir) / f"round-{self.round}"
        threads_per_worker = spec.threads_per_worker or threads
        spec = dataclasses.replace(
            spec, workers=1, nodes=len(addresses), threads_per_worker=threads_per_worker, log_dir=log_dir
        )
        node = NodeOptions(rank, rendezvous.host, rendezvous.port, addresses[rank].host, self.token)
        arguments = ("run", *spec.arguments(), *(node.arguments() if spec.nodes > 1 else ()))
        return PlaceTask(
            self.run,
            rank,
            self.payload,
            arguments,
            self.token,
            spec.grace_seconds,
            self.versions,
            host=addresses[rank].host,
            is_elastic=spec.elastic is not None and spec.nodes > 1,
        )


class RoundEnd:
    """Whether the engine's adapter has to stop the places of a round that have not ended.

    In an elastic call the others train on without one that is lost. But one that is lost and does not start again never
    ends, so the rest has a limit once the function has returned somewhere.
    """

    def __init__(self, call: EngineCall) -> None:
        self._spec, self._deadline = call.spec, math.inf

    def has_come(self, results: Iterable[PlaceResult]) -> bool:
        """Whether the rest has to be stopped, given the results of those that have ended."""
        results = list(results)
        if self._spec.elastic is None:
            return any(result.ends_round for result in results)
        if any(result.usage_error for result in results):
            return True
        # Where a place fails, the rendezvous ends those that it concerns. Others may train on.
        ended = {result.rank for result in results if result.exit_code in (0, PREEMPTED_EXIT_CODE)}
        if not ended:
            return False
        # Places that reach the rendezvous, which is in place 0, end together. Without it, others may have more to do.
        is_together = 0 in ended or len(ended) == self._spec.workers - 1
        limit = self._spec.grace_seconds + STOP_SECONDS if is_together else self._spec.start_timeout_seconds
        self._deadline = min(self._deadline, time.monotonic() + limit)
        return time.monotonic() >= self._deadline


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

    `run_round` asks the engine for places, runs the call in them, and returns their results. It raises
    `LostPlaceError` if the engine has lost places, after stopping the others. `say` shows the user why there is
    another round. A WorkerError also means that places were lost more often than `max_restarts` allows.
    """
    lost_ports = 0
    while True:
        try:
            results = run_round(call)
            lost = _interruption(results)
        except LostPlaceError as error:
            results, lost = error.results, str(error)
        if call.spec.elastic is not None and any(result.exit_code == 0 for result in results):
            # The others have trained on without a place that was lost, and have not waited for it.
            results, lost = [result for result in results if not result.ends_round], ""
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
        may_lack_values=call.spec.elastic is not None,
        last_lines=described.last_lines,
    )
