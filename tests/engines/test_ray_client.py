"""`on_ray` through Ray Client, whose driver is no process of the cluster: devices, variables of a `runtime_env`."""

import ast

import pytest
from child_environment import run_python
from engine_runs import HERE
from local_ray import ray_directory
from optional_packages import require

require("ray")

pytestmark = [pytest.mark.multi_process, pytest.mark.long]

DRIVER = """
import os
from ray.util.client.ray_client_helpers import ray_start_client_server
from tfdist.launch import on_ray

def seen(scale):
    from tfdist import cluster
    rank = cluster.detect().task.index
    return scale * rank, os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["OMP_NUM_THREADS"], os.environ["KIND"]

local = {"num_cpus": 4, "num_gpus": 2, "include_dashboard": False, "object_store_memory": 80_000_000}
with ray_start_client_server(ray_init_kwargs={**local, "runtime_env": {"env_vars": {"KIND": "blue"}}}):
    for resources in ({"CPU": 2, "GPU": 1}, {"CPU": 1, "GPU": 0.5}):
        print("values", on_ray(seen, 10, workers=2, resources_per_worker=resources))
"""


def test_devices_threads_and_variables_of_places(tmp_path):
    with ray_directory() as variables:
        variables = {**variables, "TMPDIR": str(tmp_path)}
        driver = run_python("-c", DRIVER, paths=(HERE,), limit_seconds=120, exit_code=None, **variables)
    lines = [line for line in driver.stdout.splitlines() if line.startswith("values ")]
    values = [ast.literal_eval(line.removeprefix("values ")) for line in lines]
    assert len(values) == 2, driver.stderr[-4000:]
    (first, second), halves = values
    assert {first[1], second[1]} == {"0", "1"}, "each worker has a GPU"
    assert (first[0], second[0]) == (0, 10) and first[2:] == second[2:] == ("2", "blue")
    assert len({device for _, device, *_ in halves}) == 1 and halves[0][2] == "1", "they share a GPU"
    assert not list(tmp_path.glob("tfdist-*"))
