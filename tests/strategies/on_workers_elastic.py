"""The program of the workers in `test_elastic_on_workers.py`.

    python on_workers_elastic.py FOLDER disturbed   a training that resumes with fewer workers, and later with more
    python on_workers_elastic.py FOLDER uneven      the same for a model without dropout and batch statistics
    python on_workers_elastic.py FOLDER of_four     micro-batches on two workers

When the disturbed training has ended, its workers are two with one device each. Then they compute what else tests ask
of such workers: `same`, and the exchanges of `test_compression_on_workers.py`.
"""

import json
import os
import signal
import sys
from pathlib import Path

# By attempts: which rank fails after how many more steps; at 0 before it imports TensorFlow, which saves its time.
FAULTS = [(1, 4), (1, 0), (0, 5)]


def same(folder):
    """Programs whose results one worker must reach with two micro-batches."""
    import elastic_programs
    import numpy as np

    from tfdist.compression import Policy
    from tfdist.strategies import MultiWorkerMirroredStrategy

    low_rank = Policy("powersgd:1", dense_below=0)
    strategy = MultiWorkerMirroredStrategy()
    programs = {
        **elastic_programs.PROGRAMS,
        "powersgd": lambda _: elastic_programs.compressed(MultiWorkerMirroredStrategy(compression=low_rank)),
        "powersgd in parts": lambda _: elastic_programs.compressed(
            MultiWorkerMirroredStrategy(compression=low_rank, micro_batches=2)
        ),
    }
    for name, program in programs.items():
        print(f"program: {name}", flush=True)
        np.savez(folder / f"{name}-{strategy.rank}.npz", **elastic_programs.flat({"": program(strategy)}))


def of_four(folder):
    import elastic_programs
    import numpy as np

    from tfdist.strategies import MultiWorkerMirroredStrategy

    strategy = MultiWorkerMirroredStrategy(micro_batches=2)
    outcome = elastic_programs.everything(strategy)
    np.savez(folder / f"of four-{strategy.rank}.npz", **elastic_programs.flat({"": outcome}))


def disturbed(folder, *, plain=False):
    attempt, config = int(os.environ["TFDIST_ATTEMPT"]), json.loads(os.environ["TF_CONFIG"])
    rank, steps = FAULTS[attempt] if attempt < len(FAULTS) else (0, None)
    fails = rank == config["task"]["index"]
    seen = {"workers": len(config["cluster"]["worker"])}
    if steps == 0:
        if not fails:
            signal.pause()  # until the launcher ends it
        (folder / f"attempt-{attempt}.json").write_text(json.dumps(seen))
        sys.exit("on purpose, at the start")

    import elastic_programs
    import numpy as np
    from elastic_training import Fault, train

    from tfdist.strategies import MultiWorkerMirroredStrategy

    strategy = MultiWorkerMirroredStrategy()
    assert strategy.num_workers == seen["workers"]
    if fails:
        seen["micro_batches"] = strategy.micro_batches
        (folder / f"attempt-{attempt}.json").write_text(json.dumps(seen))
    callbacks = [Fault(steps)] if fails and steps else []
    outcome = train(strategy, folder / "checkpoints", callbacks, plain=plain)
    np.savez(folder / f"training-{strategy.rank}.npz", **elastic_programs.flat({"": outcome}))


def main(folder, program):
    if program == "of_four":
        of_four(folder)
        return
    disturbed(folder, plain=program == "uneven")
    if program == "disturbed":
        from on_workers_compression import exchange

        same(folder)
        exchange(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
