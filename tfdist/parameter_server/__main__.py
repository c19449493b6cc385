"""`python -m tfdist.parameter_server`: serves the task of TF_CONFIG."""

import sys

from tfdist import cluster
from tfdist.parameter_server.serving import serve


def main() -> int:
    """Serves until the chief is done."""
    config = cluster.detect()
    if config is None or config.task.type not in ("worker", "ps"):
        sys.stderr.write(
            "This process has nothing to serve. Received: "
            f"{'no TF_CONFIG' if config is None else f'the task {config.task.type} {config.task.index}'}. Expected: "
            "TF_CONFIG with a task of the job worker or ps. `tfdist run --workers N --parameter-servers M script.py` "
            "starts workers and servers itself.\n"
        )
        return 2
    serve(dict(config.cluster.jobs), config.task.type, config.task.index)
    return 0


if __name__ == "__main__":
    sys.exit(main())
