"""Times steps of PyTorch: alone, or with DistributedDataParallel on gloo. Imports neither TensorFlow nor tfdist.

Started by `gpu_run.speed_cases`, once for each rank, with an interpreter that has PyTorch.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> int:
    """Trains the models in turns, and writes the milliseconds of a step of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--sizes", required=True, help="JSON: features, width, side, batch (of a worker)")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    # What TensorFlow does by default.
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    if options.device == "cuda":
        torch.cuda.set_device(0)
    if options.workers > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(options.port)}
        torch.distributed.init_process_group("gloo", rank=options.rank, world_size=options.workers)
    sizes = json.loads(options.sizes)
    trained = {name: _Trained(name, sizes, options) for name in ("mlp", "cnn")}
    seconds: dict[str, list[float]] = {name: [] for name in trained}
    for turn in range(options.rounds + 1):
        for name, one in trained.items():
            found = one.seconds_of_a_step(options.steps)
            if turn:  # the first turn warms up
                seconds[name].append(found)
    if options.rank == 0:
        ms = {name: 1e3 * statistics.median(found) for name, found in seconds.items()}
        parameters = {name: one.parameters for name, one in trained.items()}
        options.output.write_text(json.dumps({"ms": ms, "parameters": parameters}))
    if options.workers > 1:
        torch.distributed.destroy_process_group()
    return 0


class _Trained:
    def __init__(self, name: str, sizes: dict[str, int], options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self._device = torch.device(options.device)
        module = _mlp(sizes) if name == "mlp" else _cnn()
        shape = (sizes["features"],) if name == "mlp" else (3, sizes["side"], sizes["side"])
        self._model: Any = module.to(self._device, memory_format=torch.channels_last)
        self.parameters = sum(parameter.numel() for parameter in module.parameters())
        if options.workers > 1:
            self._model = DistributedDataParallel(self._model)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3, momentum=0.9, fused=True)
        self._inputs = torch.randn(sizes["batch"], *shape)
        self._labels = torch.randint(0, 10, (sizes["batch"],))
        if self._device.type == "cuda":
            self._inputs, self._labels = self._inputs.pin_memory(), self._labels.pin_memory()

    def seconds_of_a_step(self, steps: int) -> float:
        """Trains for some steps after one that is not timed."""
        self._step()
        self._synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self._step()
        self._synchronize()
        return (time.perf_counter() - began) / steps

    def _step(self) -> None:
        inputs = self._inputs.to(self._device, non_blocking=True)
        labels = self._labels.to(self._device, non_blocking=True)
        self._optimizer.zero_grad()
        nn.functional.cross_entropy(self._model(inputs), labels).backward()
        self._optimizer.step()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _mlp(sizes: dict[str, int]) -> nn.Module:
    layers: list[nn.Module] = []
    inputs = sizes["features"]
    for _ in range(3):
        layers += [nn.Linear(inputs, sizes["width"]), nn.ReLU()]
        inputs = sizes["width"]
    return nn.Sequential(*layers, nn.Linear(inputs, 10))


def _cnn() -> nn.Module:
    layers: list[nn.Module] = []
    inputs = 3
    for filters, strides in ((32, 1), (64, 2), (128, 2)):
        layers += [nn.Conv2d(inputs, filters, 3, strides, padding=1), nn.ReLU()]
        inputs = filters
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


if __name__ == "__main__":
    sys.exit(main())
