"""Measurements of programs for tests of planning: made up, or read from the results of benchmarks."""

import json
from pathlib import Path
from typing import Any

from tfdist.planning.measurements import (
    DENSE,
    EXCHANGE,
    GATHER,
    SUM,
    Collective,
    ExchangeMeasurement,
    LayerMeasurement,
    MachineMeasurement,
    Measurements,
    ProgramMeasurement,
    StepMeasurement,
    TransferMeasurement,
)

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
MIB = 2**20


def results(name: str) -> dict[str, Any]:
    """The results of a benchmark."""
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return document


def program(
    parameters: int = 10_000_000,
    rows: int = 64,
    *,
    fixed_seconds: float = 0.03,
    row_seconds: float = 0.0005,
    slots: int = 2,
    samples: int | None = 60_000,
    activation_bytes: int = 200_000,
    is_functional: bool = True,
) -> Measurements:
    """A program with Adam on one core: steps are linear in rows, methods have the sizes of their payloads."""
    nbytes = 4 * parameters
    sizes = [nbytes // 10, nbytes // 2, nbytes - nbytes // 10 - nbytes // 2]
    exchanges = [
        ExchangeMeasurement(method, members, seconds, tuple(_collectives(sizes, share, kind, members)), state, error)
        for method, share, kind, seconds, state, error in (
            (DENSE, 1.0, SUM, 0.010, 0, 0.0),
            ("bf16", 0.5, EXCHANGE, 0.020, 0, 0.002),
            ("int8", 0.254, EXCHANGE, 0.030, nbytes, 0.01),
            ("topk:0.01", 0.0125, GATHER, 0.040, nbytes, 0.9),
            ("powersgd:4", 0.006, SUM, 0.025, nbytes, 0.8),
        )
        for members in (2, 4)
    ]
    steps = []
    for compiled, factor in ((False, 1.0), (True, 0.9)):
        for count in (rows // 2, rows):
            seconds = factor * (fixed_seconds + row_seconds * count)
            peak = 500 * MIB + 4 * nbytes + activation_bytes * count
            steps.append(StepMeasurement(count, compiled, seconds, 0.001, 0.3 * (seconds - 0.01), 0.01, peak))
    layers = tuple(LayerMeasurement(f"dense_{index}", 0.01, parameters // 8, 4096) for index in range(8))
    transfers = tuple(
        TransferMeasurement(kind, size, 5e-4 + share * size * 2e-9, 2e-4 + share * size * 1.6e-9)
        for kind, share in ((SUM, 1.0), (GATHER, 0.8), (EXCHANGE, 0.5))
        for size in (4096, 64 * 1024, 2 * MIB)
    )
    measured = ProgramMeasurement(
        rows,
        samples,
        tuple(steps),
        tuple(exchanges),
        (0.2, 0.8, 1.0),
        layers,
        nbytes,
        nbytes,
        slots * nbytes,
        500 * MIB,
        0.0,
        is_functional,
        "Adam",
        0.1,
        5.0,
    )
    return Measurements(measured, MachineMeasurement(2, 1, 8 * 1024 * MIB, transfers), {"tensorflow": "2.21.0"})


def _collectives(sizes: list[int], share: float, kind: str, members: int) -> list[Collective]:
    found = []
    for bucket, size in enumerate(sizes):
        payload = round(size * share)
        if kind == EXCHANGE and members == 2:
            found.append(Collective(GATHER, payload, bucket))
        elif kind == EXCHANGE:
            found += [Collective(EXCHANGE, payload, bucket), Collective(GATHER, payload // members, bucket)]
        else:
            found.append(Collective(kind, payload, bucket))
    return found
