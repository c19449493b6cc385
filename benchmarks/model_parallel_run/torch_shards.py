"""Tensor parallelism of PyTorch for the transformer: `torch.distributed.tensor.parallel`, with DTensors on gloo."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module


def split(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """Splits the parameters of the transformer over the mesh, as Megatron-LM does; logits stay split."""
    by_words = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    parallelize_module(model[0].embedding, mesh, by_words)
    for block in model[1:-2]:
        columns = ("attention.query", "attention.key", "attention.value", "widen")
        plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in ("attention.output", "narrow")}
        parallelize_module(block, mesh, plan)
        block.attention._heads //= mesh.size()
    parallelize_module(model[-1], mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))


def backward_of_split_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Computes the loss of split logits and all gradients; returns the loss."""
    with loss_parallel():
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
        loss.backward()
    return loss


class Optimizers:
    """The fused Adam for split parameters, and another one for the rest: one for both is not possible."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        parameters = list(model.parameters())
        groups = ([one for one in parameters if isinstance(one, DTensor) == kind] for kind in (True, False))
        self._optimizers = [torch.optim.Adam(group, lr=learning_rate, fused=True) for group in groups]

    def zero_grad(self) -> None:
        """Removes all gradients."""
        for one in self._optimizers:
            one.zero_grad()

    def step(self) -> None:
        """Updates all parameters."""
        for one in self._optimizers:
            one.step()
