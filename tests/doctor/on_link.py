"""A task of a cluster that looks at the others only, and prints the report: `python on_link.py TIMEOUT`."""

import json
import os
import sys

from tfdist import cluster
from tfdist.doctor import peers
from tfdist.doctor.examination import examine
from tfdist.doctor.report import Report
from tfdist.doctor.situation import Situation

peers._CONNECT_SECONDS = 1.0  # of a host that drops all
result = examine(
    Situation(os.environ, cores=1, config=cluster.from_tf_config()),
    timeout_seconds=float(sys.argv[1]),
    say=lambda text: None,
    checks=(),
)
print(json.dumps(result.to_json() if isinstance(result, Report) else vars(result)))
