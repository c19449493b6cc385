"""`tfdist run`: starts workers, supervises them, restarts them, and reports why a run failed.

- `cli`: the sub-commands `run`, `checkpoints` and `doctor`.
- `processes`: worker processes, their output and heartbeats, and the supervisor.
- `restart`: root causes, outcomes and the restart policy.
- `rendezvous`: runs over several hosts.
- `notebook`: `from_notebook`, which runs a function of a notebook on workers, and `plan_from_notebook`.

The launcher never imports TensorFlow; only warm spares do (`processes/warm_spare_main.py`). The entry point is
`tfdist.launch.cli.main:main`; `python -m tfdist.launch` is the same.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist.launch.notebook.from_notebook import from_notebook as from_notebook
    from tfdist.launch.notebook.plan_from_notebook import plan_from_notebook as plan_from_notebook
    from tfdist.launch.notebook.worker_results import WorkerError as WorkerError

__all__ = ["WorkerError", "from_notebook", "plan_from_notebook"]


def __getattr__(name: str) -> Any:
    # Imported late, so that the command line and the workers load only what they need.
    if name == "from_notebook":
        from tfdist.launch.notebook.from_notebook import from_notebook

        return from_notebook
    if name == "plan_from_notebook":
        from tfdist.launch.notebook.plan_from_notebook import plan_from_notebook

        return plan_from_notebook
    if name == "WorkerError":
        from tfdist.launch.notebook.worker_results import WorkerError

        return WorkerError
    raise AttributeError(f"module 'tfdist.launch' has no attribute {name!r}")
