"""Starts a framework's workers, gives all of them orders at once, and ends them."""

import contextlib
import json
import os
import select
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from network_run.links import INTERFACE, Network
from network_run.variants import TORCH
from network_run.worker import Place

_BENCHMARKS = Path(__file__).resolve().parents[1]
_LOG_LINES = 15
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "KERAS_BACKEND": "tensorflow"}
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


class Workers:
    """The processes of one framework, one for each worker; a context manager that ends them."""

    def __init__(self, framework: str, python: str, network: Network, workload: str, folder: Path) -> None:
        """Starts them.

        Args:
          framework: `"tensorflow"` or `"torch"`.
          python: the interpreter that has it.
          network: where they run, each in its namespace, each on a core (in turns where there are more workers).
          workload: the key of the model.
          folder: for their logs and batches.
        """
        self._framework = framework
        self._logs = [folder / f"{framework}-{workload}-{rank}.log" for rank in range(len(network.addresses))]
        self._processes: list[subprocess.Popen[str]] = []
        environment = {**os.environ, **_QUIET, **_ONE_THREAD}
        environment.pop("TF_CONFIG", None)
        environment["PYTHONPATH"] = os.pathsep.join((str(_BENCHMARKS), str(_BENCHMARKS.parent)))
        if framework == TORCH:
            environment["GLOO_SOCKET_IFNAME"] = INTERFACE
        for rank, log in enumerate(self._logs):
            place = Place(rank, network.addresses, workload, str(folder))
            with log.open("w") as errors:
                self._processes.append(
                    subprocess.Popen(
                        [*network.command(rank), python, "-m", f"network_run.{framework}_worker", _json(place)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        env=environment,
                        text=True,
                        # Ctrl-C is the coordinator's: it ends the workers in order.
                        start_new_session=True,
                    )
                )

    def __enter__(self) -> "Workers":
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

    def ask(self, do: str, *, timeout_seconds: float = 600.0, **arguments: Any) -> list[dict[str, Any]]:
        """Gives all workers one order and waits for all answers.

        Args:
          do: the method of `network_run.worker.Worker`.
          timeout_seconds: how long the answers may take.
          **arguments: of that method.

        Returns:
          The answers, by rank.

        Raises:
          RuntimeError: a worker has ended or does not answer; the message has the end of its log.
        """
        order = json.dumps({"do": do, **arguments}) + "\n"
        for rank, process in enumerate(self._processes):
            pipe = cast(IO[str], process.stdin)
            try:
                pipe.write(order)
                pipe.flush()
            except BrokenPipeError as error:
                raise self._error(rank, do, "it has ended") from error
        return self._answers(do, time.monotonic() + timeout_seconds)

    def _answers(self, do: str, end: float) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        waiting = {cast(IO[str], process.stdout): rank for rank, process in enumerate(self._processes)}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise self._error(min(waiting.values()), do, "no answer in time")
            for pipe in ready:
                rank = waiting.pop(pipe)
                line = pipe.readline()
                if not line:
                    raise self._error(rank, do, f"it has ended with {self._processes[rank].wait()}")
                answers[rank] = json.loads(line)
        return [answers[rank] for rank in sorted(answers)]

    def _error(self, rank: int, do: str, what: str) -> RuntimeError:
        log = "\n".join(self._logs[rank].read_text(errors="replace").splitlines()[-_LOG_LINES:])
        return RuntimeError(
            f"Worker {rank} of {self._framework} failed. Received: {what}, asked to {do!r}; the end of its log:\n"
            f"{log}\nExpected: an answer. Leave the variant out with --variants if it is at fault."
        )


def _json(place: Place) -> str:
    return json.dumps(asdict(place))
