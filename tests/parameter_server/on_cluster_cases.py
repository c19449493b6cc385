"""The chief of the cluster in `conftest.py`: runs cases one after another and writes what they return."""

import json
import sys
import time
import traceback
import warnings
from pathlib import Path

import cluster_asynchronous_cases  # noqa: F401
import cluster_byte_cases  # noqa: F401
import cluster_compression_cases  # noqa: F401
import cluster_data_cases  # noqa: F401
import cluster_federated_cases  # noqa: F401
import cluster_loss_cases  # noqa: F401
import cluster_program_cases  # noqa: F401
import cluster_step_cases  # noqa: F401
import cluster_synchronous_cases  # noqa: F401
import cluster_variable_cases  # noqa: F401
from cluster_cases import CASES
from comparison import plain

FOLDER = Path(sys.argv[1])


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    results = {}
    for name in names:
        began, cpu = time.monotonic(), time.process_time()
        try:
            results[name] = plain(CASES[name](FOLDER))
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        took = f"{time.monotonic() - began:.1f} s, {time.process_time() - cpu:.1f} s of the processor"
        print(f"{name}: {took}", results[name].get("error", ""), flush=True)
        (FOLDER / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[2:])
