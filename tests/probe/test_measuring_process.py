"""The processes of a probe are in no cluster, whatever has started `tfdist plan`."""

import pytest

from tfdist import cluster
from tfdist.probe.run_probe import child_environment

SLURM = {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
}
KUBERNETES = {"TFDIST_NUM_WORKERS": "2", "TFDIST_SERVICE": "train", "HOSTNAME": "digits-0"}
TF_CONFIG = {"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'}


@pytest.mark.parametrize("environ", [SLURM, KUBERNETES, TF_CONFIG])
def test_children_are_in_no_cluster(environ):
    assert cluster.detect(environ) is not None
    assert cluster.detect(child_environment(environ)) is None
