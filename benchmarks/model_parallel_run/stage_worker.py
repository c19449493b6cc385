"""What the workers of both frameworks have in common."""

from typing import Any

from network_run.worker import Worker, WorkerSpec

from model_parallel_run.process_memory import peak, start_peak


class StageWorker(Worker):
    """A worker that computes a stage.

    Attributes:
        nothing: What `run` returns in a process that measures no step.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self.nothing: dict[str, Any] = {"seconds": [], "stated": None, "loss": None}
        self._before = 0

    def fingerprint(self, variant: str) -> dict[str, float]:
        """Returns nothing: stages have no weights in common."""
        return {}

    def start_peak(self) -> dict[str, int]:
        """Begins a measurement of the peak of memory."""
        self._before = start_peak()
        return {}

    def peak(self) -> dict[str, int]:
        """Returns by how many `bytes` the memory has grown at most since `start_peak`."""
        return {"bytes": peak() - self._before}
