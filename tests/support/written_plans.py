"""Plan files with the plans that a test chooses."""

import json
from pathlib import Path
from typing import Any

from tfdist.planning.plans import Plan, PlanFile, PlannedStrategy


def plan(name: str = "MultiWorkerMirroredStrategy", workers: int = 2, **more: Any) -> Plan:
    """Returns a plan.

    Args:
        name: of the strategy's class.
        workers: number of workers.
        **more: fields of `Plan`, and as `arguments` those of the strategy.
    """
    values: dict[str, Any] = {
        "compression": None,
        "jit_compile": False,
        "exact": True,
        "parameter_servers": 0,
        "has_chief": False,
        "step_seconds": 0.1,
        "samples_per_second": 640.0,
        "memory_bytes": 10**9,
        "wire_bytes": 1000,
        "accuracy": "exact",
        "reason": "the fastest",
        "code": f"{name}()",
    }
    return Plan(PlannedStrategy(name, more.pop("arguments", {})), workers=workers, **{**values, **more})


def write_plans(path: Path, *plans: Plan) -> Path:
    """Writes a file as `tfdist plan --json` does, and returns its path."""
    file = PlanFile(plans, [], {}, {"bytes_per_second": 1e9, "latency_seconds": 1e-4})
    path.write_text(json.dumps(file.to_json()))
    return path
