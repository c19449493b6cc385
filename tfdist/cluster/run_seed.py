"""The seed of a run, from which the random generators of all its workers and restarts start."""

import secrets
import zlib
from collections.abc import Mapping

from tfdist.utils.argument_checks import MAX_SEED, optional_integer_variable

SEED_VARIABLE = "TFDIST_SEED"
"""The environment variable that holds the seed of the run."""

_SEED_BITS = 31  # the seeds of TensorFlow have so many
_REMEDY = f"Set it to a number from 0 to {MAX_SEED}, or unset it."


def seed_of_run(environ: Mapping[str, str]) -> int | None:
    """Returns the seed that the environment determines; None if it determines none.

    That is TFDIST_SEED, which `tfdist run` sets in its workers. In a batch job of Slurm it is derived from the job and
    its step, so that it is the same after a requeue. In an interactive allocation the user starts run after run, which
    should differ.

    Raises:
        ValueError: TFDIST_SEED is not a valid seed.

    >>> seed_of_run({"TFDIST_SEED": "7"}), seed_of_run({"SLURM_JOB_ID": "12"}) is None
    (7, True)
    >>> batch = {"SLURM_JOB_ID": "12", "ENVIRONMENT": "BATCH"}
    >>> seed_of_run(batch) == seed_of_run({**batch, "SLURM_RESTART_COUNT": "1"})
    True
    >>> seed_of_run(batch) == seed_of_run({**batch, "SLURM_JOB_ID": "13"})
    False
    """
    seed = optional_integer_variable(environ, SEED_VARIABLE, remedy=_REMEDY)
    if seed is not None:
        if seed > MAX_SEED:
            raise ValueError(
                f"The environment variable {SEED_VARIABLE} is too large. Received: {SEED_VARIABLE}={seed}. Expected: "
                f"at most {MAX_SEED}. {_REMEDY}"
            )
        return seed
    if environ.get("ENVIRONMENT") != "BATCH" or not environ.get("SLURM_JOB_ID"):
        return None
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID")
    return zlib.crc32("/".join(environ.get(name, "") for name in names).encode()) >> (32 - _SEED_BITS)


def new_seed(environ: Mapping[str, str]) -> int:
    """Returns the seed of a new run for which the user gives none: `seed_of_run`, else a random one.

    Raises:
        ValueError: TFDIST_SEED is not a valid seed.
    """
    seed = seed_of_run(environ)
    return secrets.randbits(_SEED_BITS) if seed is None else seed
