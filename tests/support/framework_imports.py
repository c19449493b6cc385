"""Makes `import keras` cheaper in tests, where it took a third of the suite's processor time.

Keras and TensorFlow import scikit-learn, Matplotlib, IPython and SciPy merely because the tests or examples have them
installed, each only for a feature that no test uses. Here they are not importable while Keras or TensorFlow is being
imported; before and afterwards, they are. Nor is garbage collected meanwhile: the imports create a million objects and
discard few, and the objects that they create stay out of later collections, which are rarer than by default, too:
tracing creates many objects that live as long as its graph.

Keras imports pandas, which takes a tenth of the start of a process, for its `isinstance`: it gets classes that ask
pandas once the program has imported it.

Once TensorFlow has been imported, it is prepared for trainings of few steps.
"""

import functools
import gc
import sys
import typing
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_ALLOCATIONS_BEFORE_A_COLLECTION = 10_000  # Python's default: 700
_FRAMEWORKS = frozenset({"keras", "tensorflow"})
_OPTIONAL = frozenset({"IPython", "matplotlib", "scipy", "sklearn"})


class _OfPandas(type):
    """A class of pandas: nothing is its instance before the program imports pandas."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, getattr(sys.modules.get("pandas"), cls.__name__, ()))


class _PandasLoader(Loader):
    """Loads what stands for pandas in Keras."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        for name in ("DataFrame", "Series"):
            setattr(module, name, _OfPandas(name, (), {}))


class _Finder:
    """Hides optional packages while a framework is being imported."""

    def __init__(self) -> None:
        self._frameworks_in_progress = 0

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._frameworks_in_progress and name in _OPTIONAL:
            raise ModuleNotFoundError(f"{name} is hidden from Keras and TensorFlow by the tests", name=name)
        if self._frameworks_in_progress and name == "pandas":
            return ModuleSpec(name, _PandasLoader())
        if name not in _FRAMEWORKS or (spec := PathFinder.find_spec(name, path, target)) is None or not spec.loader:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            self._frameworks_in_progress += 1
            collects = gc.isenabled()
            gc.disable()
            try:
                execute(module)
            finally:
                self._frameworks_in_progress -= 1
                if isinstance(getattr(sys.modules.get("pandas"), "DataFrame", None), _OfPandas):
                    del sys.modules["pandas"]  # the program imports the real one
                if collects:
                    gc.freeze()
                    gc.enable()
            if name == "tensorflow" and hasattr(module, "__version__"):  # not that of a test
                _prepare_tensorflow()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _prepare_tensorflow() -> None:
    """Makes short trainings cheaper in this process; see the modules."""
    import shared_iterator_functions
    import without_autotuning

    # Tracing asks for each operation whether values are instances of protocols, and Python 3.11 collects the names of a
    # protocol each time.
    typing._get_protocol_attrs = functools.cache(typing._get_protocol_attrs)
    shared_iterator_functions.install()
    without_autotuning.install()


def install() -> None:
    """Hides the packages in this process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        gc.set_threshold(_ALLOCATIONS_BEFORE_A_COLLECTION, *gc.get_threshold()[1:])
