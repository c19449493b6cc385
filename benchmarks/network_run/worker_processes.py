"""Starts the worker processes of a framework, calls methods on all of them at once, and ends them."""

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from network_run.links import INTERFACE, Network
from network_run.variants import JAX, TORCH
from network_run.worker import WorkerSpec

_BENCHMARKS = Path(__file__).resolve().parents[1]
_LOG_LINES = 15
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "KERAS_BACKEND": "tensorflow"}
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


class WorkerProcesses:
    """The worker processes of one framework; a context manager that ends them.

    Attributes:
        links: The number of links between the workers, one for each namespace.
    """

    def __init__(
        self,
        framework: str,
        python: str,
        network: Network,
        workload: str,
        folder: Path,
        *,
        is_one_host: bool = False,
        name: str = "",
        room: str = "network_run",
        hosts: Sequence[int] | None = None,
        extra_environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the processes.

        Args:
            framework: `"tensorflow"`, `"torch"` or `"jax"`.
            python: An interpreter that has the framework.
            network: Each worker runs in one of its namespaces and on a core; more workers than cores share them.
            workload: Key of the model.
            folder: For logs and batches.
            is_one_host: Whether all processes run in the first namespace.
            name: Of this group of processes; by default the framework.
            room: The package of the benchmarks whose `{framework}_worker` the processes run.
            hosts: For each process the number of its namespace; by default one process in each.
            extra_environment: Further environment variables.
        """
        self.links = len(network.addresses)
        self._name = name or framework
        workers = len(network.addresses)
        addresses = network.addresses[:1] * workers if is_one_host else network.addresses
        hosts = ([0] * workers if is_one_host else range(workers)) if hosts is None else hosts
        self._logs = [folder / f"{self._name}-{workload}-{rank}.log" for rank in range(len(hosts))]
        self._processes: list[subprocess.Popen[str]] = []
        environment = {**os.environ, **_QUIET, **_ONE_THREAD, **(extra_environment or {})}
        environment.pop("TF_CONFIG", None)
        environment["PYTHONPATH"] = os.pathsep.join((str(_BENCHMARKS), str(_BENCHMARKS.parent)))
        if framework == TORCH:
            environment["GLOO_SOCKET_IFNAME"] = INTERFACE
            # What `torch.compile` writes, except precompiled headers, is removed with the logs. Its helper processes
            # would outlive the workers.
            environment |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        if framework == JAX:
            environment |= {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
        for rank, log in enumerate(self._logs):
            spec = WorkerSpec(rank, addresses, workload, str(folder))
            with log.open("w") as errors:
                self._processes.append(
                    subprocess.Popen(
                        [*network.command(hosts[rank]), python, "-m", f"{room}.{framework}_worker", _json(spec)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        env=environment,
                        text=True,
                        # Ctrl-C goes to this process only, which ends the workers.
                        start_new_session=True,
                    )
                )

    def __enter__(self) -> "WorkerProcesses":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    cast(IO[str], pipe).close()

    def call(self, method: str, *, timeout_seconds: float = 600.0, **arguments: Any) -> list[dict[str, Any]]:
        """Calls a method on all workers and waits for all results.

        Args:
            method: Of `network_run.worker.Worker`.
            timeout_seconds: Limit for the results.
            **arguments: Of the method.

        Returns:
            The results, by rank.

        Raises:
            RuntimeError: A worker has exited or does not answer; the message contains the end of its log.
        """
        request = json.dumps({"method": method, **arguments}) + "\n"
        for rank, process in enumerate(self._processes):
            pipe = cast(IO[str], process.stdin)
            try:
                pipe.write(request)
                pipe.flush()
            except BrokenPipeError as error:
                raise self._error(rank, method, "it has exited") from error
        return self._results(method, time.monotonic() + timeout_seconds)

    def _results(self, method: str, end: float) -> list[dict[str, Any]]:
        results: dict[int, dict[str, Any]] = {}
        waiting = {cast(IO[str], process.stdout): rank for rank, process in enumerate(self._processes)}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise self._error(min(waiting.values()), method, "no answer in time")
            for pipe in ready:
                rank = waiting.pop(pipe)
                line = pipe.readline()
                if not line:
                    raise self._error(rank, method, f"it has exited with {self._processes[rank].wait()}")
                results[rank] = json.loads(line)
        return [results[rank] for rank in sorted(results)]

    def _error(self, rank: int, method: str, what: str) -> RuntimeError:
        log = "\n".join(self._logs[rank].read_text(errors="replace").splitlines()[-_LOG_LINES:])
        return RuntimeError(
            f"Worker {rank} of {self._name} failed. Received: {what}, in {method!r}; the end of its log:\n"
            f"{log}\nExpected: a result. If a variant is the cause, select others with --variants."
        )


def _json(spec: WorkerSpec) -> str:
    return json.dumps(asdict(spec))
