"""planned(): which strategy it creates with which arguments, its errors, and what `compile` takes from the plan."""

import inspect
import json
import logging
import math
import re
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from launched_runs import launch_once
from written_plans import plan, write_plans

from tfdist import strategies
from tfdist.keras_internals.compiled_calls import jit_compiles, jit_compiles_on_workers
from tfdist.planning.plans import PlanFile, Processes, best_plan
from tfdist.strategies import (
    DiLoCo,
    LoadBalancing,
    MirroredStrategy,
    Pipeline,
    ShardedState,
    Synchronous,
    planned,
    planned_strategy,
    worker_start,
)

pytestmark = pytest.mark.usefixtures("cpus")
WIRE_BYTES = 8 * 260 + 4 * 64
NAMES = ("MirroredStrategy", "ModelParallelStrategy", "MultiWorkerMirroredStrategy", "ParameterServerStrategy")


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    """Replaces the strategies by records of their names and arguments."""

    def record(name):
        def create(**arguments):
            return SimpleNamespace(name=name, arguments=arguments, rank=0)

        create.__signature__ = inspect.signature(getattr(strategies, name))
        return create

    class MultiWorker:  # also the class of an isinstance
        def __new__(cls):
            return SimpleNamespace(name="MultiWorkerMirroredStrategy", arguments={})

    for variable in ("TF_CONFIG", "TFDIST_PLAN", "TFDIST_PROBE", "TFDIST_RUN_ID", "TFDIST_FULL_WORKERS"):
        monkeypatch.delenv(variable, raising=False)
    for name in NAMES:
        monkeypatch.setitem(planned_strategy._STRATEGIES, name, record(name))
        monkeypatch.setattr(planned_strategy, name, record(name))
    monkeypatch.setattr(planned_strategy, "MultiWorkerMirroredStrategy", MultiWorker)


@pytest.fixture
def in_cluster(monkeypatch):
    """Returns a function that describes a cluster with these numbers of tasks, in which this process is the first."""

    def describe(*, by_launcher=True, **tasks):
        jobs = {job: [f"{job}:{number}" for number in range(1, count + 1)] for job, count in tasks.items()}
        task = {"type": "chief" if "chief" in jobs else "worker", "index": 0}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": jobs, "task": task}))
        monkeypatch.setenv("TFDIST_RUN_ID", "1")
        if not by_launcher:
            monkeypatch.delenv("TFDIST_RUN_ID")

    return describe


def created(strategy):
    return strategy.name, strategy.arguments


def test_the_first_plan_for_the_number_of_workers(in_cluster, tmp_path, monkeypatch):
    int8 = plan(workers=3, compression="int8", arguments={"bucket_bytes": 1024})
    path = write_plans(tmp_path / "plan.json", plan(workers=2), int8, plan(workers=3, compression="bf16"))
    in_cluster(worker=3)
    strategy = planned(path)
    assert created(strategy) == ("MultiWorkerMirroredStrategy", {"compression": "int8", "bucket_bytes": 1024})
    assert strategy.plan == int8
    monkeypatch.setenv("TFDIST_PLAN", str(path))
    assert planned().plan == int8


BALANCING = {"max_share": [0.5, 0.7]}
OPTIONS = [
    ("mode", {"class": "DiLoCo", "arguments": {"sync_every": 10, "fragments": 2}}, DiLoCo(10, fragments=2)),
    ("mode", {"class": "Synchronous"}, Synchronous()),
    ("load_balancing", {"class": "LoadBalancing", "arguments": BALANCING}, LoadBalancing(**BALANCING)),
    ("shard_optimizer_state", {"class": "ShardedState", "arguments": {"accumulators": True}}, ShardedState(True)),
    ("shares", [1, 3], [1, 3]),
    ("compression", {"kernel": "int8", ".*": None}, {"kernel": "int8", ".*": None}),
]


@pytest.mark.parametrize(("name", "written", "expected"), OPTIONS, ids=str)
def test_options_are_created(in_cluster, tmp_path, name, written, expected):
    in_cluster(worker=2)
    strategy = planned(write_plans(tmp_path / "plan.json", plan(arguments={name: written})))
    assert strategy.arguments == {name: expected}


def test_parameter_servers_and_chiefs_need_a_plan_for_them(in_cluster, tmp_path):
    servers = plan("ParameterServerStrategy", parameter_servers=1, has_chief=True)
    pipeline = {"class": "Pipeline", "arguments": {"stages": 2, "micro_batches": 8}}
    stages = plan("ModelParallelStrategy", has_chief=True, arguments={"pipeline": pipeline})
    path = write_plans(tmp_path / "plan.json", plan(compression="int8"), servers, stages)
    in_cluster(chief=1, worker=2, ps=1)
    assert created(planned(path)) == ("ParameterServerStrategy", {})
    in_cluster(chief=1, worker=2)
    assert created(planned(path)) == ("ModelParallelStrategy", {"pipeline": Pipeline(2, 8)})


def test_under_other_launchers_a_chief_may_be_a_worker(in_cluster, tmp_path):
    path = write_plans(tmp_path / "plan.json", plan(workers=3, compression="int8"))
    in_cluster(chief=1, worker=2, by_launcher=False)
    assert planned(path).plan.workers == 3
    in_cluster(chief=1, worker=2)
    with pytest.raises(ValueError, match="Received: 2 workers with a chief, and the plan .* for 3 workers. Expected"):
        planned(path)


def test_without_a_cluster_and_under_the_probe_it_is_plain(in_cluster, tmp_path, monkeypatch):
    path = write_plans(tmp_path / "plan.json", plan(workers=1, compression="int8"))
    plain = "MultiWorkerMirroredStrategy", {}
    assert created(planned(path)) == plain and planned(path).plan is None
    in_cluster(worker=1)
    assert planned(path).arguments == {"compression": "int8"}
    monkeypatch.setenv("TFDIST_PROBE", "1")
    assert created(planned(path)) == created(planned("none.json")) == plain


def test_without_a_plan_the_processes_decide(in_cluster):
    assert planned().name == "MultiWorkerMirroredStrategy" and planned().plan is None
    in_cluster(worker=2)
    assert planned().name == "MultiWorkerMirroredStrategy"
    in_cluster(chief=1, worker=3, by_launcher=False)
    assert planned().name == "MultiWorkerMirroredStrategy"
    in_cluster(chief=1, worker=3)
    assert created(planned()) == ("ModelParallelStrategy", {"pipeline": Pipeline(stages=3)})
    in_cluster(chief=1, worker=3, ps=1)
    assert created(planned()) == ("ParameterServerStrategy", {})


def diloco(arguments, name="DiLoCo"):
    return plan(arguments={"mode": {"class": name, "arguments": arguments}})


BAD = {
    "class": (plan("OneDeviceStrategy"), "cannot create. Received: the class 'OneDeviceStrategy' in .* one of Mirr"),
    "argument": (plan(arguments={"speed": 1}), r"Received: MultiWorkerMirroredStrategy with \['speed'\] in"),
    "option": (diloco({"command": "true"}, "os.system"), "Received: the class 'os.system' in .* one of Asynchronous"),
    "class that is no name": (diloco({}, ["DiLoCo"]), r"the class \['DiLoCo'\] in"),
    "argument of an option": (diloco({"speed": 1}), r"DiLoCo with \['speed'\]"),
    "arguments that are none": (diloco([1]), r"DiLoCo with \[1\]"),
    "value": (diloco({"sync_every": 0}), "Invalid `sync_every`"),
    "workers": (plan(workers=3), "nothing for the processes of this run. Received: 2 workers, and .* for 3 workers"),
}


@pytest.mark.parametrize(("written", "message"), BAD.values(), ids=BAD)
def test_plans_that_cannot_be_created(in_cluster, tmp_path, written, message):
    in_cluster(worker=2)
    with pytest.raises(ValueError, match=message):
        planned(write_plans(tmp_path / "plan.json", written))


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format": 2}', '{"format": 1, "plans": [{}]}'])
def test_files_that_are_no_plans(tmp_path, content):
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(f"The plan cannot be read. Received: {path}")):
        planned(path)


def test_fewer_workers_use_their_own_plan_or_that_of_all(in_cluster, tmp_path, monkeypatch, caplog):
    in_cluster(worker=2)
    monkeypatch.setenv("TFDIST_FULL_WORKERS", "3")
    path = write_plans(tmp_path / "plan.json", plan(workers=3, compression="int8", jit_compile=True))
    with caplog.at_level(logging.WARNING, logger="tfdist"):
        strategy = planned(path)
    assert strategy.arguments == {"compression": "int8"}
    assert strategy.plan.jit_compile and math.isnan(strategy.plan.step_seconds)
    assert len(caplog.records) == 1 and "nothing for the 2 workers that are left" in caplog.text
    own = write_plans(tmp_path / "own.json", plan(workers=3, compression="int8"), plan(workers=2, compression="bf16"))
    assert planned(own).arguments == {"compression": "bf16"} and len(caplog.records) == 1
    shares = write_plans(tmp_path / "shares.json", plan(workers=3, arguments={"shares": [1, 1, 2]}))
    with pytest.raises(ValueError, match="nothing for the processes"):
        planned(shares)


def test_accumulation_is_left_to_the_optimizer(in_cluster, tmp_path, caplog):
    in_cluster(worker=2)
    with caplog.at_level(logging.WARNING, logger="tfdist"):
        strategy = planned(write_plans(tmp_path / "plan.json", plan(gradient_accumulation_steps=4)))
    assert strategy.arguments == {}
    assert [record.getMessage().rpartition(". ")[2] for record in caplog.records] == [
        "Create it with gradient_accumulation_steps=4."
    ]


def test_workers_with_different_plans(monkeypatch):
    other = "MultiWorkerMirroredStrategy(compression='int8')"
    monkeypatch.setattr(worker_start.key_values, "exchange", lambda name, own, rank, size: [own, other])
    worker_start.compare_plans(0, 2, "p", other)
    with pytest.raises(ValueError, match=r"different plans. Received: no plan on worker 0, and .*int8.* on worker 1"):
        worker_start.compare_plans(0, 2, "p", "no plan")


def test_the_best_plan_of_a_run(tmp_path):
    slow, fast = plan(workers=2), plan(workers=8, samples_per_second=2000.0)
    servers = plan("ParameterServerStrategy", workers=8, parameter_servers=1, samples_per_second=3000.0)
    file = PlanFile.read(write_plans(tmp_path / "plan.json", slow, servers, fast))
    assert best_plan(file) == servers
    assert best_plan(file, with_servers=False) == fast
    assert best_plan(file, workers=2) == slow
    assert best_plan(file, workers=4) is None
    assert Processes.of(servers) == Processes(8, 1)


@pytest.mark.parametrize("of_plan", [True, False])
def test_compile_takes_the_plans_jit_compile(cpus, of_plan):
    """Attention alone would be compiled by default if it were larger, and a layer like this one never."""
    strategy = MirroredStrategy(cpus[:2])
    strategy.plan = plan(jit_compile=of_plan)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        assert jit_compiles(model) is jit_compiles_on_workers(model) is of_plan
        assert model.get_compile_config()["jit_compile"] == "auto"
        model.compile("sgd", "mse", jit_compile=not of_plan)
        assert jit_compiles(model) is jit_compiles_on_workers(model) is not of_plan


@pytest.fixture(scope="session")
def planned_run(tmp_path_factory):
    """Two workers of a plan with int8, whose program also creates the same strategy by hand."""
    best = plan(compression="int8", arguments={"bucket_bytes": 2048}, wire_bytes=WIRE_BYTES)
    path = write_plans(tmp_path_factory.mktemp("plan") / "plan.json", plan(workers=4), best)
    script = Path(__file__).with_name("on_workers_planned.py")
    return launch_once(tmp_path_factory, "a plan", script, options=["--plan", str(path), "--workers", "2"])


def test_a_run_by_a_plan_trains_as_the_strategy_by_hand(planned_run):
    planned_run.assert_complete()
    weights = planned_run.arrays("weights-0.npz") | planned_run.arrays("weights-1.npz")
    seen = [planned_run.json(f"{rank}.json") for rank in range(2)]
    assert seen[0]["strategy"] == seen[1]["strategy"] == ["MultiWorkerMirroredStrategy", "int8", 2]
    for by_plan, by_hand in (("planned_0", "hand_0"), ("planned_1", "hand_1"), ("planned_0", "planned_1")):
        np.testing.assert_array_equal(weights[by_plan], weights[by_hand])
    assert np.any(weights["planned_0"] != weights["dense_0"])  # int8 has an effect


def test_the_report_compares_the_plan_with_the_run(planned_run):
    """32 x 64 values in 8 blocks of 256 values and a scale, and a bias of 64 values."""
    comparison = planned_run.json("0.json")["comparison"]
    assert comparison["planned_step_seconds"] == 0.1
    assert 0 < comparison["measured_step_seconds"] < 60
    assert comparison["measured_wire_bytes"] == comparison["planned_wire_bytes"] == WIRE_BYTES
    [line] = [line for line in planned_run.output.splitlines() if "Step: planned 100 ms, measured " in line]
    assert line.startswith("[0] ")
    assert line.endswith("Bytes sent in a step: planned 2.3 kB, measured 2.3 kB.")
