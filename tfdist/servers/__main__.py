"""`python -m tfdist.servers`: runs the server of the task that TF_CONFIG describes."""

import sys

from tfdist import cluster
from tfdist.servers.serving import serve


def main() -> int:
    """Serves until the chief has ended; returns the exit code."""
    config = cluster.detect()
    if config is None or config.task.type not in ("worker", "ps"):
        received = "no TF_CONFIG" if config is None else f"the task {config.task.type} {config.task.index}"
        sys.stderr.write(
            f"This process has nothing to serve. Received: {received}. Expected: TF_CONFIG with a task of the job "
            "worker or ps. `tfdist run --workers N --parameter-servers M script.py` and `tfdist run --chief --workers "
            "N script.py` start workers and servers themselves.\n"
        )
        return 2
    serve(dict(config.cluster.jobs), config.task.type, config.task.index)
    return 0


if __name__ == "__main__":
    sys.exit(main())
