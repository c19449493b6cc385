"""Compares stock Keras 3 under `tf.distribute` with Keras under tfdist, program by program.

    python benchmarks/stock.py

Every program of `tests/stock` runs twice, with one import changed, on two CPU replicas or two workers, and is compared
with one process on the complete batch. A number is the largest difference of any weight or log, relative for values
larger than 1. The table is also written to `benchmarks/results/stock.json`.
"""

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "stock"))

from rows import ROWS, describe, run_rows

_RESULTS = Path(__file__).parent / "results" / "stock.json"


def main() -> int:
    """Runs all programs, prints the table and writes it."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    results = run_rows()
    table = []
    for row in ROWS:
        said = {library: describe(row, library, result) for library, result in results[row.name].items()}
        table.append({"name": row.name, "program": row.program, **said})
    print("| program | stock Keras 3 | tfdist |\n|---|---|---|")
    for line in table:
        print(f"| {line['program']} | {line['stock']} | {line['tfdist']} |")
    versions = {name: version(name) for name in ("tensorflow", "keras")}
    _RESULTS.parent.mkdir(exist_ok=True)
    _RESULTS.write_text(json.dumps({"versions": versions, "rows": table}, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
