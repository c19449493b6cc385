"""Measurements of the benchmark's MLP, made of its published step times with two workers."""

from typing import Any

from planned_programs import results

from tfdist.planning.cost_terms import on_shared_cores
from tfdist.planning.measurements import (
    DENSE,
    EXCHANGE,
    GATHER,
    SUM,
    Collective,
    ExchangeMeasurement,
    MachineMeasurement,
    Measurements,
    ProgramMeasurement,
    StepMeasurement,
    TransferMeasurement,
)

GRADIENT_BYTES = 40_083_496
ROWS = 64  # of a worker, `benchmarks/workloads.py`
METHODS = (DENSE, "int8", "powersgd:4")
# Gradients of 2048 x 10, 2048 x 2048 (twice) and 784 x 2048, with biases, in the order of backpropagation.
_BUCKETS = (16_867_368, 16_785_408, 6_430_720)


def median_seconds(workers: int, link: str, variant: str) -> float:
    """A published step time of the MLP."""
    variants = _published(workers)["workloads"]["mlp"]["links"][link]["variants"]
    return float(variants["dense" if variant == DENSE else variant]["median_seconds"])


def achieved_bytes_per_second(workers: int, link: str) -> float:
    """What a plain transfer reaches on a link."""
    return float(_published(workers)["workloads"]["mlp"]["links"][link]["achieved_bits_per_second"]) / 8


def from_two_workers(core_share: float = 1.0) -> Measurements:
    """The MLP on a worker that has a part of a core.

    Everything is from the run of two workers without a limit on the link: what a step takes longer than without an
    exchange is copies, for the dense exchange, or encoding, for the others.
    """
    floor = median_seconds(2, "unshaped", "floor")
    copied = (median_seconds(2, "unshaped", DENSE) - floor) / GRADIENT_BYTES
    step = StepMeasurement(ROWS, False, floor, 0.0, floor / 4, floor / 4, 500_000_000)  # two multiplications of four
    exchanges = [_dense(members) for members in (2, 3)]
    for method, nbytes in (("int8", 10_178_295), ("powersgd:4", 233_928)):
        code = median_seconds(2, "unshaped", method) - floor - nbytes * copied
        exchanges += [_compressed(method, nbytes, members, code) for members in (2, 3)]
    sizes = (0, 10**6, 10**8)
    transfers = tuple(
        TransferMeasurement(kind, nbytes, part * nbytes * copied, part * nbytes * copied)
        for kind, part in ((SUM, 1.0), (GATHER, 1.0), (EXCHANGE, 0.5))
        for nbytes in sizes
    )
    program = ProgramMeasurement(
        rows=ROWS,
        samples=60_000,
        steps=(step,),
        exchanges=tuple(exchanges),
        bucket_ready=(0.45, 0.85, 1.0),
        layers=(),
        variable_bytes=3 * GRADIENT_BYTES,
        gradient_bytes=GRADIENT_BYTES,
        slot_bytes=2 * GRADIENT_BYTES,
        process_bytes=400_000_000,
        data_seconds=0.0,
        is_functional=False,
        optimizer="Adam",
        save_seconds=0.1,
        start_seconds=5.0,
    )
    machine = MachineMeasurement(2, 1, 16 * 10**9, transfers)
    return on_shared_cores(Measurements(program, machine, {}), round(machine.cores / core_share))


def _dense(members: int) -> ExchangeMeasurement:
    sums = tuple(Collective(SUM, nbytes, bucket) for bucket, nbytes in enumerate(_BUCKETS))
    return ExchangeMeasurement(DENSE, members, 0.0, sums, 0, 0.0)


def _compressed(method: str, nbytes: int, members: int, code: float) -> ExchangeMeasurement:
    collectives: list[Collective] = []
    for bucket, size in enumerate(_BUCKETS):
        part = nbytes * size // sum(_BUCKETS)
        if method.startswith("powersgd"):
            collectives += [Collective(SUM, part // 2, bucket)] * 2
        elif members == 2:
            collectives.append(Collective(GATHER, part, bucket))
        else:
            collectives += [Collective(EXCHANGE, part, bucket), Collective(GATHER, part // members, bucket)]
    return ExchangeMeasurement(method, members, max(code, 0.0), tuple(collectives), GRADIENT_BYTES, 0.01)


def _published(workers: int) -> dict[str, Any]:
    return results("network" if workers == 2 else f"network-{workers}")
