"""A worker that trains a stage with PyTorch's `torch.distributed.pipelining` on gloo, or a complete model alone."""

import time
from typing import Any

import torch
import torch.distributed
from network_run.worker import TORCH_PORT, WorkerSpec, serve
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from model_parallel_run import torch_shards
from model_parallel_run.pipeline_variants import (
    BATCHES,
    BY_NAME,
    LEARNING_RATE,
    MICRO_BATCHES,
    TENSOR,
    WORKLOADS,
    Variant,
)
from model_parallel_run.stage_worker import StageWorker
from model_parallel_run.torch_models import build_model

_SCHEDULES = {"1f1b": pipelining.Schedule1F1B, "gpipe": pipelining.ScheduleGPipe}


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


class _Trained:
    """This worker's stage of a model, or the complete model, and its optimizer."""

    def __init__(self, spec: WorkerSpec, variant: Variant) -> None:
        torch.manual_seed(0)
        self._is_first, self._is_last = spec.rank == 0, spec.rank == spec.workers - 1
        self.model: Any = build_model(spec.workload)
        self._schedule: Any = None
        self._is_split = variant.schedule == TENSOR
        if self._is_split:
            torch_shards.split(self.model, init_device_mesh("cpu", (spec.workers,)))
            self._optimizer: Any = torch_shards.Optimizers(self.model, LEARNING_RATE)
            self.taken = 0
            return
        if variant.schedule:
            bounds = [0, *WORKLOADS[spec.workload].ends, len(self.model)]
            self.model = self.model[bounds[spec.rank] : bounds[spec.rank + 1]]
            stage = pipelining.PipelineStage(self.model, spec.rank, spec.workers, torch.device("cpu"))
            self._schedule = _SCHEDULES[variant.schedule](stage, MICRO_BATCHES, loss_fn=_loss)
        # The fused optimizer is the fastest one on CPUs.
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self.taken = 0

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> float | None:
        """Trains on a batch; returns its loss on the last stage."""
        self._optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if self._is_split:
            losses.append(torch_shards.backward_of_split_logits(self.model(inputs), labels))
        elif self._schedule is None:
            losses.append(_loss(self.model(inputs), labels))
            losses[0].backward()
        else:
            arguments = (inputs,) if self._is_first else ()
            targets = {"target": labels, "losses": losses} if self._is_last else {}
            self._schedule.step(*arguments, return_outputs=False, **targets)
        self._optimizer.step()
        self.taken += 1
        found = [loss.full_tensor() if isinstance(loss, DTensor) else loss for loss in losses]
        return torch.stack([loss.detach() for loss in found]).mean().item() if losses else None


class TorchWorker(StageWorker):
    """Holds a stage of each variant in one process, with one process group."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Connects to the other workers; `GLOO_SOCKET_IFNAME` names the interface."""
        super().__init__(spec)
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://{spec.addresses[0]}:{TORCH_PORT}", rank=spec.rank, world_size=spec.workers
        )
        batches = [WORKLOADS[spec.workload].batch(index) for index in range(BATCHES)]
        self._batches = [(torch.from_numpy(inputs), torch.from_numpy(labels).long()) for inputs, labels in batches]
        self._trained: dict[str, _Trained] = {}

    def make(self, names: list[str]) -> dict[str, Any]:
        """Creates the models."""
        self._trained = {name: _Trained(self.spec, BY_NAME[name]) for name in names}
        sizes = sorted(parameter.numel() for parameter in build_model(self.spec.workload).parameters())
        return {"sizes": sizes, "versions": {"torch": torch.__version__}}

    def run(self, variant: str, steps: int) -> dict[str, Any]:
        """Runs steps; a variant without stages runs on the first worker only."""
        trained, seconds, loss = self._trained[variant], [], None
        if BY_NAME[variant].schedule is None and self.spec.rank:
            return self.nothing
        for _ in range(steps):
            batch = self._batches[trained.taken % len(self._batches)]
            start = time.perf_counter()
            loss = trained.step(*batch)
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds, "stated": None, "loss": loss}


if __name__ == "__main__":
    serve(TorchWorker)
