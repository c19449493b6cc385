"""The part of a worker's environment that starts its random generators from the seed of the run."""

import os
from collections.abc import Mapping
from pathlib import Path

from tfdist.cluster import SEED_VARIABLE

_START_UP = str(Path(__file__).with_name("start_up"))
_HASH_SEED = "PYTHONHASHSEED"


def seeded_environment(environ: Mapping[str, str], seed: int) -> dict[str, str]:
    """Returns `environ` for a process whose generators start from `seed`; see `start_up/sitecustomize.py`.

    Python's hashes of strings, and so the order of sets, follow from the seed, too, unless PYTHONHASHSEED is set.

    >>> seeded = seeded_environment({"PYTHONPATH": "/mine", "PYTHONHASHSEED": "random"}, 7)
    >>> seeded["TFDIST_SEED"], seeded["PYTHONHASHSEED"], seeded["PYTHONPATH"].endswith("start_up:/mine")
    ('7', 'random', True)
    >>> has_started(seeded)["PYTHONPATH"]
    '/mine'
    """
    path = os.pathsep.join(filter(None, [_START_UP, environ.get("PYTHONPATH")]))
    return {_HASH_SEED: str(seed), **environ, SEED_VARIABLE: str(seed), "PYTHONPATH": path}


def has_started(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment of `seeded_environment` as it is in the process once Python has started."""
    rest = environ["PYTHONPATH"].removeprefix(_START_UP).removeprefix(os.pathsep)
    others = {name: value for name, value in environ.items() if name != "PYTHONPATH"}
    return {**others, "PYTHONPATH": rest} if rest else others
