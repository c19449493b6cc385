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
from tfdist.launch.run_spec import START_TIMEOUT_SECONDS, NodeOptions, RunSpec
from tfdist.utils.argument_checks import check_seconds


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
        """Checks the arguments of `caller`, such as "on_ray", and pickles the call. All rounds have the same seed.

        Raises:
            TypeError: If `function` is not callable, or it or an argument cannot be pickled.
            ValueError: If an option is invalid.
            ImportError: If cloudpickle is not installed.
        """
        check_function(function, caller=caller)
        check_seconds("start_timeout_seconds", start_timeout_seconds)  # the places have other defaults
        spec = RunSpec.of_call(start_timeout_seconds=start_timeout_seconds, **options)
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
        return PlaceTask(self.run, rank, self.payload, arguments, self.token, spec.grace_seconds, self.versions)
