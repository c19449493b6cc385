"""What the chief of `test_parameter_server_*.py` does: runs cases, one after another, and writes what they return."""

import json
import sys
import time
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))

import ps_asynchronous_cases  # noqa: F401
import ps_compression_cases  # noqa: F401
import ps_loss_cases  # noqa: F401
import ps_synchronous_cases  # noqa: F401
import ps_variable_cases  # noqa: F401
from comparison import plain
from ps_cases import CASES

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
