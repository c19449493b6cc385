"""What a worker measures if it shares its cores with others: more workers on a machine than it has cores."""

import dataclasses
from typing import Any

from tfdist.planning.measurements import Measurements


def on_shared_cores(measured: Measurements, workers: int) -> Measurements:
    """Returns the measurements of one of `workers` workers on this machine.

    They exchange by shared memory. Workers in one step compute, encode and wait at the same times, so that each gets an
    equal part of the cores.

    Args:
        measured: The measurements of a worker with `cores_per_worker` cores.
        workers: The number of workers on this machine.
    """
    machine, program = measured.machine, measured.program
    transfers = machine.local_transfers or machine.transfers
    slowness = max(workers * machine.cores_per_worker / machine.cores, 1.0)
    if slowness > 1.0:
        of_steps = "seconds deviation_seconds forward_seconds update_seconds"
        steps = tuple(_slower(one, slowness, of_steps) for one in program.steps)
        exchanges = tuple(_slower(one, slowness, "compute_seconds") for one in program.exchanges)
        layers = tuple(_slower(one, slowness, "seconds") for one in program.layers)
        transfers = tuple(_slower(one, slowness, "seconds core_seconds") for one in transfers)
        program = _slower(program, slowness, "data_seconds save_seconds start_seconds")
        program = dataclasses.replace(program, steps=steps, exchanges=exchanges, layers=layers)
    return dataclasses.replace(measured, program=program, machine=dataclasses.replace(machine, transfers=transfers))


def _slower(record: Any, factor: float, names: str) -> Any:
    return dataclasses.replace(record, **{name: factor * getattr(record, name) for name in names.split()})
