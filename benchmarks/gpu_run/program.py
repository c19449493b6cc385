"""Trains under one strategy and writes the outcome: the program of the kit's processes and workers.

Started by `gpu_run.cases`, for several workers through `tfdist run`.
"""

import argparse
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_run.gpu_machine import divide_device

_MEGABYTES_OF_A_LOGICAL_GPU = 3072


def main() -> int:
    """Trains all of `--trainings`; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trainings", required=True, help="names, separated by commas")
    parser.add_argument("--strategy", required=True, choices=sorted(_STRATEGIES))
    parser.add_argument("--kind", required=True, choices=("CPU", "GPU"), help="the devices that compute")
    parser.add_argument("--logical", type=int, default=1, help="logical devices of this process")
    parser.add_argument("--compression")
    parser.add_argument("--sharded", action="store_true", help="shard_optimizer_state")
    parser.add_argument("--nccl", action="store_true")
    parser.add_argument("--gpu-of-rank", action="store_true", help="each worker takes the GPU of its rank")
    parser.add_argument("--kill-at-step", type=int, default=0)
    parser.add_argument("--flip-at-step", type=int, default=0, help="of a bit of a weight")
    parser.add_argument("--check-gradients", type=float, help="with kernels and precision as by default")
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    if options.gpu_of_rank and "TF_CONFIG" in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    return _train(options)


def _train(options: argparse.Namespace) -> int:
    import keras
    import tensorflow as tf

    from gpu_run.outcomes import write
    from gpu_run.trainings import TRAININGS, elastic, recovered

    if not options.check_gradients:
        tf.config.experimental.enable_tensor_float_32_execution(False)
        tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(1)
    if options.strategy != "servers":  # whose chief does not compute
        divide_device(options.kind, options.logical, _MEGABYTES_OF_A_LOGICAL_GPU)
    strategy = _STRATEGIES[options.strategy](options)
    rank, failed = getattr(strategy, "rank", 0), 0
    names = options.trainings.split(",")
    for name in names:
        try:
            if name == "recovered":
                arrays, facts = recovered(strategy, options.folder, options.kill_at_step)
            elif name == "elastic":
                faults = {"kill_at_step": options.kill_at_step, "flip_at_step": options.flip_at_step}
                arrays, facts = elastic(strategy, options.folder, **faults, check_gradients=options.check_gradients)
            else:
                arrays, facts = TRAININGS[name](strategy)
            write(options.folder, rank, name, arrays, facts)
        except Exception:
            if len(names) == 1:
                raise
            traceback.print_exc()
            failed = 1
    return failed


def _devices(options: argparse.Namespace) -> list[str]:
    return [f"{options.kind}:{index}" for index in range(options.logical)]


def _communication(options: argparse.Namespace) -> Any:
    import tensorflow as tf

    communication = tf.distribute.experimental
    nccl = communication.CommunicationImplementation.NCCL
    return communication.CommunicationOptions(implementation=nccl) if options.nccl else None


def _replicated_arguments(options: argparse.Namespace) -> dict[str, Any]:
    from tfdist.compression import Policy

    compression = Policy(options.compression, dense_below=0) if options.compression else None
    return {"compression": compression, "shard_optimizer_state": options.sharded}


def _none(options: argparse.Namespace) -> Any:
    import tensorflow as tf

    return tf.distribute.get_strategy()


def _mirrored(options: argparse.Namespace) -> Any:
    from tfdist.strategies import MirroredStrategy

    return MirroredStrategy(_devices(options), **_replicated_arguments(options))


def _workers(options: argparse.Namespace) -> Any:
    from tfdist.strategies import MultiWorkerMirroredStrategy

    return MultiWorkerMirroredStrategy(communication_options=_communication(options), **_replicated_arguments(options))


def _servers(options: argparse.Namespace) -> Any:
    from tfdist.strategies import ParameterServerStrategy, Synchronous

    return ParameterServerStrategy(mode=Synchronous())


def _pipeline(options: argparse.Namespace) -> Any:
    from tfdist.strategies import ModelParallelStrategy, Pipeline

    return ModelParallelStrategy(devices=_devices(options), pipeline=Pipeline(stages=options.logical, micro_batches=2))


def _tensor(options: argparse.Namespace) -> Any:
    import keras

    from tfdist.strategies import ModelParallelStrategy, Pipeline

    devices = _devices(options)
    mesh = keras.distribution.DeviceMesh((1, len(devices)), ["batch", "model"], devices)
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*up/kernel"] = (None, "model")
    layout[".*up/bias"] = ("model",)
    layout[".*down/kernel"] = ("model", None)
    return ModelParallelStrategy(devices, pipeline=Pipeline(stages=1), layout_map=layout)


_STRATEGIES = {
    "none": _none,
    "mirrored": _mirrored,
    "workers": _workers,
    "servers": _servers,
    "pipeline": _pipeline,
    "tensor": _tensor,
}

if __name__ == "__main__":
    sys.exit(main())
