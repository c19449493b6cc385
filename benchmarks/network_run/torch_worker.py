"""A worker that trains with PyTorch: without gradient exchange, and with DistributedDataParallel on gloo."""

import time
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from network_run import variants
from network_run.torch_models import MODELS
from network_run.worker import TORCH_PORT, Worker, WorkerSpec, serve

_LEARNING_RATE = 1e-3
# The smallest value that PyTorch permits with error feedback; the warm-up has more steps.
_START_POWERSGD_STEP = 2


class _Trained:
    """A model, its optimizer, and the number of its steps."""

    def __init__(self, workload: str, variant: variants.Variant) -> None:
        torch.manual_seed(0)
        # The memory layout of images as in TensorFlow, and a fused optimizer: both are faster on CPUs.
        self.module = MODELS[workload]().to(memory_format=torch.channels_last)
        self.model: Any = self.module
        self._loss_of: Any = _loss
        self.powersgd: Any = None
        if variant.compiled:
            # Inside DDP, as PyTorch 2.13 leaves the model out when it compiles DDP itself. Isolated, or the variants of
            # one process share graphs, and DDP's is not split where a bucket is complete.
            self.model = torch.compile(self.module, isolate_recompiles=True)
            self._loss_of = torch.compile(_loss, isolate_recompiles=True)
        if variant.sends:
            self.model = self._distributed(variant)
        parameters = self.model.parameters()
        if variant.reduction == variants.ZERO:
            self.optimizer: Any = ZeroRedundancyOptimizer(
                parameters, torch.optim.Adam, parameters_as_bucket_view=True, lr=_LEARNING_RATE, fused=True
            )
        else:
            self.optimizer = torch.optim.Adam(parameters, lr=_LEARNING_RATE, fused=True)
        self.taken = 0

    def _distributed(self, variant: variants.Variant) -> DistributedDataParallel:
        model = DistributedDataParallel(self.model, bucket_cap_mb=variant.bucket_mb)
        kind, _, rank = (variant.compression or "").partition(":")
        if kind == "fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif kind == "bf16":
            model.register_comm_hook(None, _bf16_hook)
        elif kind == "powersgd":
            self.powersgd = powerSGD_hook.PowerSGDState(
                None,
                matrix_approximation_rank=int(rank),
                start_powerSGD_iter=_START_POWERSGD_STEP,
                use_error_feedback=True,
                warm_start=True,
            )
            model.register_comm_hook(self.powersgd, _powersgd_hook)
        elif kind:
            raise ValueError(
                f"Unknown PyTorch hook. Received: compression={variant.compression!r}. "
                "Expected: 'fp16', 'bf16', 'powersgd:<rank>' or None. Correct the table of variants."
            )
        return model

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self._loss_of(self.model(inputs), labels)
        loss.backward()
        self.optimizer.step()
        self.taken += 1
        return loss.item()


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def _bf16_hook(state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    # Without NCCL, DDP rejects the hook by its name, though gloo can reduce bfloat16.
    return default_hooks.bf16_compress_hook(state, bucket)


def _powersgd_hook(
    state: powerSGD_hook.PowerSGDState, bucket: torch.distributed.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    # The hook starts its second and third collective when the previous one has ended. With several buckets, gloo's
    # threads start them in different orders on the workers, and the process aborts ("Received data size doesn't match
    # expected size"). So each bucket ends before the next one starts.
    future = powerSGD_hook.powerSGD_hook(state, bucket)
    future.wait()
    return future


class TorchWorker(Worker):
    """Holds all PyTorch variants in one process, with one process group."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Connects to the other workers; `GLOO_SOCKET_IFNAME` names the interface."""
        super().__init__(spec)
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"tcp://{spec.addresses[0]}:{TORCH_PORT}",
            rank=spec.rank,
            world_size=spec.workers,
        )
        with np.load(spec.batches_file) as stored:
            inputs, labels = torch.from_numpy(stored["inputs"]), torch.from_numpy(stored["labels"]).long()
        if inputs.ndim == 5:
            # A view with the channels where PyTorch expects them; its memory is contiguous.
            inputs = inputs.permute(0, 1, 4, 2, 3)
        self._batches = list(zip(inputs, labels, strict=True))
        self._trained: dict[str, _Trained] = {}

    def make(self, names: list[str]) -> dict[str, Any]:
        """Creates the models."""
        self._trained = {name: _Trained(self.spec.workload, variants.BY_NAME[name]) for name in names}
        model = MODELS[self.spec.workload]()
        return {
            "sizes": sorted(parameter.numel() for parameter in model.parameters()),
            "versions": {"torch": torch.__version__},
        }

    def run(self, variant: str, steps: int) -> dict[str, Any]:
        """Runs steps; `stated` says whether PowerSGD compresses yet."""
        trained, seconds = self._trained[variant], []
        for _ in range(steps):
            batch = self._batches[trained.taken % len(self._batches)]
            start = time.perf_counter()
            trained.step(*batch)
            seconds.append(time.perf_counter() - start)
        stated = None
        if trained.powersgd is not None:
            stated = {"is_active": trained.powersgd.iter > _START_POWERSGD_STEP}
        return {"seconds": seconds, "stated": stated}

    def held_bytes(self, variant: str) -> dict[str, int]:
        """Returns `value`: the size of the optimizer's state that this worker holds."""
        optimizer = self._trained[variant].optimizer
        states = getattr(optimizer, "optim", optimizer).state.values()
        tensors = [value for state in states for value in state.values() if torch.is_tensor(value)]
        return {"value": sum(tensor.numel() * tensor.element_size() for tensor in tensors)}

    def fingerprint(self, variant: str) -> dict[str, float]:
        """Returns the sum of the weights' absolute values."""
        weights = self._trained[variant].module.parameters()
        return {"value": sum(float(v.detach().abs().sum(dtype=torch.float64)) for v in weights)}


if __name__ == "__main__":
    serve(TorchWorker)
