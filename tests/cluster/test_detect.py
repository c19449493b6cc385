import json
import os
import subprocess
import sys
from unittest import mock

import pytest

from tfdist import cluster

TF_CONFIG = {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}})}
SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
KUBERNETES = {"TFDIST_NUM_WORKERS": "2", "TFDIST_SERVICE": "s", "HOSTNAME": "job-1"}


@pytest.mark.parametrize(
    ("environ", "source"),
    [
        ({**TF_CONFIG, **SLURM, **KUBERNETES}, "TF_CONFIG"),
        ({**SLURM, **KUBERNETES}, "Slurm"),
        (KUBERNETES, "Kubernetes"),
        ({**SLURM, "SLURM_NTASKS": "1", **KUBERNETES}, "Kubernetes"),
    ],
)
def test_order(environ, source):
    assert cluster.detect(environ).source == source


@pytest.mark.parametrize(
    "environ",
    [{}, {"TF_CONFIG": ""}, {**SLURM, "SLURM_NTASKS": "1"}, {"HOSTNAME": "job-1", "JOB_COMPLETION_INDEX": "1"}],
)
def test_nothing_described(environ):
    assert cluster.detect(environ) is None


def test_wrong_description_raises():
    with pytest.raises(ValueError, match="TF_CONFIG is wrong"):
        cluster.detect({"TF_CONFIG": "{", **SLURM})


def test_default_is_the_process_environment():
    with mock.patch.dict(os.environ, KUBERNETES, clear=True):
        assert cluster.detect().rank == 1


def test_cluster_and_launcher_do_without_tensorflow():
    code = (
        "import sys, tfdist.cluster, tfdist.launch.cli.main\n"
        "assert not {'tensorflow', 'keras', 'numpy', 'absl'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
