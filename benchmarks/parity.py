"""Compares N replicas with one process on the concatenated batch, case by case.

    make parity

Every case of `tests/parity` runs on two replicas of one process, on two workers, and on two workers of two devices
each. A number is the largest difference of any weight, log, evaluation or prediction, relative for values larger than
1. The table is also written to `benchmarks/results/parity.json`.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "parity"))

from comparison import TOLERANCE
from setups import SETUPS, run_cases

_RESULTS = Path(__file__).parent / "results" / "parity.json"


def main() -> int:
    """Runs the cases, prints the table, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="names of cases (default: all)")
    names = parser.parse_args().cases
    table: dict[str, dict[str, str]] = {}
    largest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        by_setup = {}
        for setup in SETUPS:
            print(f"running {setup} ...", file=sys.stderr, flush=True)
            by_setup[setup] = run_cases(setup, Path(folder) / "results.json", Path(folder) / "references", names)
    for setup, results in by_setup.items():
        for name, result in results.items():
            difference = result.get("difference", float("inf"))
            largest = max(largest, difference, result.get("rank_difference", 0.0))
            table.setdefault(name, {})[str(setup)] = f"{difference:.1e}"
    columns = [str(setup) for setup in SETUPS]
    width = max(map(len, table))
    print(f"{'case'.ljust(width)}  " + "  ".join(column.rjust(16) for column in columns))
    for name in sorted(table):
        print(f"{name.ljust(width)}  " + "  ".join(table[name].get(column, "-").rjust(16) for column in columns))
    print(f"largest difference: {largest:.1e} (float32 rounding; the tests allow {TOLERANCE:.0e})")
    if not names:
        _RESULTS.parent.mkdir(exist_ok=True)
        _RESULTS.write_text(json.dumps({"largest": largest, "differences": table}, indent=1, sort_keys=True) + "\n")
    return 0 if largest <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
