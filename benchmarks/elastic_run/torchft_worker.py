"""A worker of `benchmarks/elastic.py` that trains with torchft: the perceptron, the kills and the notes of `worker.py`.

python torchft_worker.py FOLDER OPTIONS, with the rank in TFDIST_BENCHMARK_RANK and the address of torchft's lighthouse
in TORCHFT_LIGHTHOUSE.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed
from torch import nn
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.ddp import DistributedDataParallel

_ROWS = 32  # of each worker
_LONGEST_STEP = timedelta(seconds=30)


def model_of(parameters: int) -> nn.Module:
    """Returns a perceptron with two equal hidden layers and about so many parameters."""
    width = round(parameters**0.5)
    layers = [nn.Linear(32, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)]
    return nn.Sequential(*layers)


def main() -> None:
    """Trains as the options in JSON say."""
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    rank = int(os.environ["TFDIST_BENCHMARK_RANK"])
    torch.set_num_threads(1)  # as `tfdist run` chooses for three workers on two cores
    torch.manual_seed(0)
    notes = (folder / f"events-{rank}.jsonl").open("a")

    def note(kind: str, step: int, living: int = 0) -> None:
        notes.write(json.dumps([kind, rank, step, list(range(living)), time.time()]) + "\n")
        notes.flush()

    model = model_of(options["parameters"])
    adam = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_LONGEST_STEP),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": adam.state_dict()},
        min_replica_size=1,
        timeout=_LONGEST_STEP,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"worker-{rank}",
        hostname="localhost",
    )
    parallel = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, adam)
    generator = np.random.default_rng(rank)
    note("ready", 0)
    while manager.current_step() < options["steps"]:
        x = torch.from_numpy(generator.normal(size=(_ROWS, 32)).astype(np.float32))
        before = manager.current_step()
        optimizer.zero_grad()
        nn.functional.mse_loss(parallel(x), x[:, :1]).backward()
        optimizer.step()
        step = manager.current_step()
        if step == before:
            continue  # not committed
        note("step", step, manager.num_participants() if manager.is_participating() else 0)
        for at, victim in options["kills"]:
            mark = folder / f"killed-{at}"
            if step >= at and victim == rank and not mark.exists():
                mark.touch()
                note("kill", step)
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(options["pause_seconds"])
    manager.shutdown(wait=False)
    os._exit(0)  # threads of torchft would wait for others


if __name__ == "__main__":
    main()
