"""The call of a function on the workers of an engine: what the user asked for, and what each place does."""

import dataclasses
import hashlib
import os
import platform
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tfdist
from tfdist.cluster import new_seed
from tfdist.launch.function_call.function_pickling import check_function, import_cloudpickle, pickle_call
from tfdist.utils.argument_checks import check_seconds, check_seed, check_whole_number

START_TIMEOUT_SECONDS = 300.0


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


class Versions(NamedTuple):
    """What the driver and the places must have in common, so that a function can be sent."""

    python: str  # Python's version, without its last part
    cloudpickle: str  # the first part of cloudpickle's version
    tfdist: str  # the version of tfdist

    @classmethod
    def of_this_process(cls) -> "Versions":
        """Returns the versions here."""
        python = ".".join(platform.python_version_tuple()[:2])
        return cls(python, import_cloudpickle().__version__.partition(".")[0], tfdist.__version__)

    def __str__(self) -> str:
        return f"Python {self.python}, cloudpickle {self.cloudpickle}, tfdist {self.tfdist}"


@dataclasses.dataclass(frozen=True)
class EngineCall:
    """The call of a function on the workers of an engine."""

    payload: bytes = dataclasses.field(repr=False)  # the pickled call
    workers: int  # number of workers, and of places
    parameter_servers: int = 0  # number of parameter servers, which run beside the workers
    has_chief: bool = False  # whether a chief runs in place 0, beside its worker, and calls the function alone
    max_restarts: int = 0  # how often all workers may be restarted
    threads_per_worker: int | None = None  # threads of each worker; None: those that the engine gives a place
    # the seed of the run, the same in all rounds
    seed: int = dataclasses.field(default_factory=lambda: new_seed(os.environ))
    log_dir: str | None = None  # directory for the workers' output on their hosts, or None
    grace_seconds: float = 5.0  # seconds from SIGTERM to SIGKILL when workers are ended
    start_timeout_seconds: float = START_TIMEOUT_SECONDS  # how long to wait for places and for workers
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
        workers: Any,
        parameter_servers: Any = 0,
        chief: Any = False,
        max_restarts: Any = 0,
        threads_per_worker: Any = None,
        seed: Any = None,
        log_dir: str | os.PathLike[str] | None = None,
        grace_seconds: Any = 5.0,
        start_timeout_seconds: Any = START_TIMEOUT_SECONDS,
    ) -> "EngineCall":
        """Checks the arguments of `caller`, such as "on_ray", and pickles the call.

        Raises:
            TypeError: If `function` is not callable, or it or an argument cannot be pickled.
            ValueError: If an option is invalid.
            ImportError: If cloudpickle is not installed.
        """
        check_function(function, caller=caller)
        check_whole_number("workers", workers, at_least=1)
        check_whole_number("parameter_servers", parameter_servers, at_least=0)
        check_whole_number("max_restarts", max_restarts, at_least=0)
        if threads_per_worker is not None:
            check_whole_number("threads_per_worker", threads_per_worker, at_least=1)
        if seed is not None:
            check_seed(seed)
        check_seconds("grace_seconds", grace_seconds)
        check_seconds("start_timeout_seconds", start_timeout_seconds)
        if not start_timeout_seconds:
            raise ValueError(
                f"Invalid `start_timeout_seconds`. Received: start_timeout_seconds={start_timeout_seconds}. Expected: "
                "a number of seconds above 0, such as 300."
            )
        if chief and parameter_servers:
            raise ValueError(
                f"Parameter servers have a chief already. Received: chief={chief!r} with parameter_servers="
                f"{parameter_servers}. Expected: one of them. Remove `chief` for ParameterServerStrategy, "
                "`parameter_servers` for ModelParallelStrategy."
            )
        return cls(
            pickle_call(function, arguments),
            workers,
            parameter_servers,
            bool(chief),
            max_restarts,
            threads_per_worker,
            new_seed(os.environ) if seed is None else seed,
            None if log_dir is None else os.fspath(Path(log_dir).absolute()),
            float(grace_seconds),
            float(start_timeout_seconds),
        )

    @property
    def calls(self) -> int:
        """How many processes call the function: all workers, or the chief."""
        return 1 if self.has_chief or self.parameter_servers else self.workers

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
        return dataclasses.replace(self, max_restarts=max_restarts, round=self.round + 1)

    def task(self, rank: int, addresses: Sequence[PlaceAddress], *, threads: int | None = None) -> PlaceTask:
        """Returns what a place does.

        `threads` are the cores that the engine gives each place, if that is known.
        """
        nodes = len(addresses)
        arguments = ["run", "--workers", "1", "--network", "host", "--max-restarts", str(self.max_restarts)]
        arguments += ["--seed", str(self.seed)]
        arguments += ["--grace", f"{self.grace_seconds:g}", "--start-timeout", f"{self.start_timeout_seconds:g}"]
        if nodes > 1:
            rendezvous = addresses[0]
            host = f"[{rendezvous.host}]" if ":" in rendezvous.host else rendezvous.host
            arguments += ["--nodes", str(nodes), "--node-rank", str(rank), "--rendezvous", f"{host}:{rendezvous.port}"]
            arguments += ["--address", addresses[rank].host]
        if self.has_chief:
            arguments.append("--chief")
        if self.parameter_servers:
            arguments += ["--parameter-servers", str(self.parameter_servers)]
        if (count := self.threads_per_worker or threads) is not None:
            arguments += ["--threads-per-worker", str(count)]
        if self.log_dir is not None:
            # A launcher empties its files; those of earlier rounds say why there is another.
            directory = os.path.join(self.log_dir, f"round-{self.round}") if self.round else self.log_dir
            arguments += ["--log-dir", directory]
        return PlaceTask(self.run, rank, self.payload, tuple(arguments), self.token, self.grace_seconds, self.versions)
