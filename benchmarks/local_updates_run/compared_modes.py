"""What `benchmarks/local_updates.py` compares."""

from typing import Any

FLOOR, DILOCO, CALM = "floor", "DiLoCo, int4", "DiLoCo, momentum 0.5"
SYNC_EVERY, OVERLAP_STEPS, FRAGMENTS = 100, 45, 4
ACCURACY_SYNC_EVERY = 20


def strategy_arguments(name: str, sync_every: int) -> dict[str, Any]:
    """Returns the arguments of `MultiWorkerMirroredStrategy` of a variant. Import TensorFlow before."""
    import keras

    from tfdist.strategies import DiLoCo, LocalSGD

    return {
        "synchronous": {},
        "synchronous, int4": {"compression": "int4"},
        "LocalSGD": {"mode": LocalSGD(sync_every)},
        "DiLoCo": {"mode": DiLoCo(sync_every)},
        CALM: {"mode": DiLoCo(sync_every, lambda: keras.optimizers.SGD(1.0, momentum=0.5, nesterov=True))},
        "LocalSGD, int4": {"mode": LocalSGD(sync_every), "compression": "int4"},
        DILOCO: {"mode": DiLoCo(sync_every), "compression": "int4"},
        f"{DILOCO}, overlap": {
            "mode": DiLoCo(sync_every, fragments=FRAGMENTS, overlap_steps=OVERLAP_STEPS * sync_every // SYNC_EVERY),
            "compression": "int4",
        },
    }[name]


VARIANTS = tuple(
    f"synchronous|synchronous, int4|LocalSGD|DiLoCo|{CALM}|LocalSGD, int4|DiLoCo, int4|DiLoCo, int4, overlap".split("|")
)
