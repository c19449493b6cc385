"""Starts the random generators of a worker from the seed of the run, before its program begins.

Python imports the first module of this name on its path when it starts. The launcher puts this directory in front of a
worker's PYTHONPATH. The module removes it, so that the worker's program and processes that it starts see the user's
own PYTHONPATH, then runs the `sitecustomize` that Python would have found without it.

NumPy is seeded when the program imports it: what a program sets in `os.environ` before that still has its effect.
"""

import os
import random
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

_NUMPY = "numpy.random"
# Some of the libraries that they import draw from `random`. A warm spare has imported them before the program begins.
_KEEPING = ("tensorflow", "keras")


class _SeedingFinder:
    """Finds modules as the other finders do, and seeds or restores the generators once they are imported."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._imported: set[str] = set()  # a program may look for a module first, and import it again later

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in (_NUMPY, *_KEEPING) or name in self._imported:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in finders if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._extend(spec.loader)
        return spec

    def _extend(self, loader: Any) -> None:
        execute = loader.exec_module
        if hasattr(execute, "seeds"):  # found before: a loader of a zip file is one for all its modules
            return

        def execute_and_seed(module: ModuleType) -> None:
            del loader.exec_module
            if module.__name__ not in (_NUMPY, *_KEEPING):
                execute(module)
                return
            self._imported.add(module.__name__)
            state = random.getstate()
            execute(module)
            if module.__name__ in _KEEPING:
                random.setstate(state)
            elif hasattr(module, "seed"):
                module.seed(self._seed)

        # Replaced on the instance, so that the module has the same loader as without this finder.
        execute_and_seed.seeds = True  # type: ignore[attr-defined]
        loader.exec_module = execute_and_seed


def _leave_path(directory: str) -> None:
    sys.path[:] = [entry for entry in sys.path if entry != directory]
    user_path = os.environ.get("PYTHONPATH", "").removeprefix(directory).removeprefix(os.pathsep)
    if user_path:
        os.environ["PYTHONPATH"] = user_path
    else:
        os.environ.pop("PYTHONPATH", None)


def _run_own_sitecustomize() -> None:
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    sys.modules["sitecustomize"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


def _start() -> None:
    _leave_path(os.path.dirname(__file__))
    seed = os.environ.get("TFDIST_SEED", "")
    if not seed.isdigit():
        _run_own_sitecustomize()
        return
    random.seed(int(seed))
    finder = _SeedingFinder(int(seed))
    sys.meta_path.insert(0, finder)
    _run_own_sitecustomize()
    # Moved in front of the finders that the user's module has installed, which would find NumPy and Keras first.
    sys.meta_path.remove(finder)
    sys.meta_path.insert(0, finder)


if __name__ == "sitecustomize":  # not if a tool imports it as a part of tfdist
    _start()
