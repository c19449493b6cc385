"""The program of the workers of test_options_together.py: trains with each pair of options that works.

python on_workers_together.py FOLDER
"""

import json
import os
import sys
import traceback
from pathlib import Path

import numpy as np
import options_together


def main(folder):
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    errors = {}
    for number, (names, cell) in enumerate(options_together.table().items()):
        if cell != "yes":
            continue
        print(f"cell: {names}", flush=True)
        try:
            weights, losses = options_together.trained(names, folder / f"checkpoints-{number}")
        except Exception:
            errors[str(number)] = traceback.format_exc()
            break  # the other worker waits in vain; the launcher ends it
        np.savez(folder / f"together-{number}-{rank}.npz", losses=losses, **weights)
    (folder / f"errors-{rank}.json").write_text(json.dumps(errors))
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
