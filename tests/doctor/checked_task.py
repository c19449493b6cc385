"""A task of a cluster that checks only its peers, and prints the report: `python checked_task.py TIMEOUT`."""

import json
import os
import sys

from tfdist import cluster
from tfdist.doctor import peer_connections as peers
from tfdist.doctor.check_context import CheckContext
from tfdist.doctor.check_runner import run_checks
from tfdist.doctor.report import Report


def main(timeout_seconds: float) -> None:
    peers._CONNECT_SECONDS = 1.0  # for a host that drops all packets
    context = CheckContext(os.environ, cores=1, config=cluster.from_tf_config())
    result = run_checks(context, timeout_seconds=timeout_seconds, say=lambda text: None, checks=())
    print(json.dumps(result.to_json() if isinstance(result, Report) else vars(result)))


if __name__ == "__main__":
    main(float(sys.argv[1]))
