"""`tfdist run`: starts the workers of one host, watches them, starts them again, and says why a run failed.

The launcher never imports TensorFlow; a warm spare, which is a worker to be, does (`spare_main.py`).

The entry point is `tfdist.launch.main:main`; `python -m tfdist.launch` is the same. `from_notebook` does the same for a
function of a notebook.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist.launch.notebook import from_notebook as from_notebook
    from tfdist.launch.notebook_errors import WorkerError as WorkerError

__all__ = ["WorkerError", "from_notebook"]


def __getattr__(name: str) -> Any:
    # Late, so that the command line, and each worker, load only what they need.
    if name == "from_notebook":
        from tfdist.launch.notebook import from_notebook

        return from_notebook
    if name == "WorkerError":
        from tfdist.launch.notebook_errors import WorkerError

        return WorkerError
    raise AttributeError(f"module 'tfdist.launch' has no attribute {name!r}")
