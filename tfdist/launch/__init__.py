"""`tfdist run`: starts workers, supervises them, restarts them, and reports why a run failed.

The launcher never imports TensorFlow; only warm spares do (`processes/warm_spare_main.py`). The entry point is
`tfdist.launch.cli.main:main`; `python -m tfdist.launch` is the same.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist.launch.engines.on_dask import on_dask as on_dask
    from tfdist.launch.engines.on_ray import on_ray as on_ray
    from tfdist.launch.engines.on_spark import on_spark as on_spark
    from tfdist.launch.function_call.worker_results import WorkerError as WorkerError
    from tfdist.launch.notebook import from_notebook as from_notebook
    from tfdist.launch.notebook import plan_from_notebook as plan_from_notebook

# Imported late, so that the command line and the workers load only what they need.
_MODULES = {
    "WorkerError": "function_call.worker_results",
    "from_notebook": "notebook",
    "on_dask": "engines.on_dask",
    "on_ray": "engines.on_ray",
    "on_spark": "engines.on_spark",
    "plan_from_notebook": "notebook",
}
__all__ = ["WorkerError", "from_notebook", "on_dask", "on_ray", "on_spark", "plan_from_notebook"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tfdist.launch' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tfdist.launch.{_MODULES[name]}"), name)
