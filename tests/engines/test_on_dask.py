"""`on_dask` on a LocalCluster: the contract of engines, other clients and clusters, tasks that call it."""

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import shutil
import subprocess
import sys

import engine_functions as functions
import numpy as np
import pytest
from engine_contract import BOTH, EngineContract, both
from engine_runs import assert_identical, engine_environment, eventually
from local_dask import cluster_of, require_dask

from tfdist.data import from_dask
from tfdist.launch import WorkerError, on_dask
from tfdist.utils.cores_and_ports import ReservedPorts

distributed = require_dask()
psutil = pytest.importorskip("psutil")


@pytest.fixture(scope="module")
def temporary(tmp_path_factory):
    """The directory of temporary files of this process and of Dask's."""
    directory = tmp_path_factory.mktemp("temporary")
    with engine_environment(directory):
        yield directory


@pytest.fixture(scope="module")
def shared_client(temporary):
    with cluster_of(2) as client:
        yield client


@pytest.fixture
def client(shared_client, temporary):
    """A client of two Dask workers; afterwards they have no child, no new port, no task, and there is no file."""
    pids = set(shared_client.run(os.getpid).values())
    before = ports(pids)
    yield shared_client
    eventually(lambda: not any(shared_client.run(tasks_of).values()), "tasks in Dask workers")
    # A task that was cancelled may still end its place.
    eventually(lambda: not any(map(children, pids)), "the children of Dask workers")
    eventually(lambda: not list(temporary.glob("tfdist-*")), "the directories of places")
    if pids == set(shared_client.run(os.getpid).values()):
        assert ports(pids) == before


@pytest.fixture
def engine(client):
    return client


class TestOnDask(EngineContract):
    """A place is a process of a Dask worker, which its nanny starts again."""

    call = staticmethod(on_dask)
    owner = 3
    too_few = r"Received: 2 in the cluster, 2 of them .* Expected: workers=3\."
    lost = r"place 1 was lost with Dask worker .*tcp://127\.0\.0\.1:\d+"
    driver_context = '__import__("distributed").Client(sys.argv[1])'

    def one_place(self, engine):
        return {"client": engine}

    def address(self, engine):
        return engine.scheduler.address


def children(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children()
    return []


def ports(pids):
    connections = [connection for pid in pids for connection in psutil.Process(pid).net_connections("tcp")]
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def tasks_of(dask_worker):
    return list(map(str, dask_worker.state.tasks))


def test_workers_without_a_resource_are_not_counted(client):
    with pytest.raises(TimeoutError, match=r"Received: 2 in the cluster, 0 of them with a free thread, {'GPU': 1}"):
        on_dask(functions.task_and_threads, 1, workers=1, resources={"GPU": 1}, start_timeout_seconds=0.5)


@pytest.mark.long
def test_calls_at_a_time_take_turns(client):
    """Without turns, calls of several clients hold one Dask worker each, and wait for the other."""
    with contextlib.ExitStack() as stack:
        address = client.scheduler.address
        clients = [stack.enter_context(distributed.Client(address, set_as_default=False)) for _ in range(4)]
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(8))
        call = functools.partial(on_dask, functions.task_and_threads, workers=2, start_timeout_seconds=60)
        calls = [pool.submit(call, scale, client=clients[scale % 4]) for scale in range(8)]
        assert [call.result(120)[1][1] for call in calls] == list(range(8))


def test_a_task_of_dask_leaves_its_thread_to_the_places(client):
    assert client.submit(functions.call_in_task, 2, pure=False).result(240) == BOTH


def test_a_task_of_slurm_is_no_cluster(client):
    variables = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"}
    variables |= {"SLURM_STEP_NODELIST": "a,b", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    client.run(set_variables, variables)
    try:
        assert on_dask(functions.task_and_threads, 1, workers=2) == BOTH
        assert on_dask(functions.task_and_threads, 1, workers=1) == [("worker", 0, "1")]
    finally:
        client.run(set_variables, dict.fromkeys(variables))


def set_variables(variables):
    for name, value in variables.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def test_other_clients_are_refused():
    with pytest.raises(TypeError, match=r"`client` is not a Dask client. Received: client='tcp://a:1'"):
        on_dask(functions.task_and_threads, 1, client="tcp://a:1", workers=1)


def test_no_client_is_an_error(monkeypatch):
    monkeypatch.setattr("distributed.get_client", no_client)
    with pytest.raises(ValueError, match=r"There is no Dask client. Received: client=None"):
        on_dask(functions.task_and_threads, 1, workers=1)


def no_client():
    raise ValueError("No global client found")


def test_an_asynchronous_client_is_refused(client):
    async def refused():
        async with distributed.Client(client.scheduler.address, asynchronous=True, set_as_default=False) as own:
            with pytest.raises(ValueError, match=r"`on_dask` cannot use an asynchronous client"):
                on_dask(functions.task_and_threads, 1, client=own, workers=1)

    asyncio.run(refused())


@pytest.mark.long
def test_partitions_that_a_killed_dask_worker_held(temporary, tmp_path):
    """Dask computes them again, although the places occupy all its threads."""
    frames = pytest.importorskip("dask.dataframe")
    rows = 32 * functions.STEPS_OF_EPOCH
    frame = {"x": np.linspace(-1, 1, rows, dtype="float32"), "y": np.linspace(0, 1, rows, dtype="float32")}
    with cluster_of(2) as client:
        data = from_dask(frames.from_dict(frame, npartitions=6), client=client)
        values = {}
        for victim in (None, TestOnDask.owner):
            (tmp_path / str(victim)).mkdir()
            call = functions.train, str(tmp_path / str(victim)), victim, data
            values[victim] = on_dask(*call, client=client, workers=2, max_restarts=1)
        assert (tmp_path / str(TestOnDask.owner) / "killed").exists()
        assert_identical(values[TestOnDask.owner][0][0], values[None][0][0])
        data.close()


@pytest.mark.long
def test_a_dask_worker_that_retires_lets_the_function_save(temporary, tmp_path):
    with cluster_of(2) as client, concurrent.futures.ThreadPoolExecutor(1) as pool:
        call = pool.submit(on_dask, functions.wait_for_signal, str(tmp_path), client=client, workers=2)
        eventually(both(tmp_path, "started"), "started")
        client.retire_workers([sorted(client.scheduler_info()["workers"])[0]])
        with pytest.raises(WorkerError, match=r"A place of the workers was lost"):
            call.result(60)
    assert both(tmp_path, "saved")()


@pytest.mark.long
def test_a_cancelled_task_ends_its_places(client, tmp_path):
    task = client.submit(wait_in_task, str(tmp_path), pure=False)
    eventually(both(tmp_path, "started"), "started")
    task.cancel()
    eventually(both(tmp_path, "saved"), "saved")


def wait_in_task(directory):
    return on_dask(functions.wait_for_signal, directory, workers=2)


@pytest.mark.long
def test_dask_workers_that_are_threads_of_this_process(temporary):
    with cluster_of(2, processes=False):
        assert on_dask(functions.task_and_threads, 10, workers=2) == [("worker", 0, "1"), ("worker", 10, "1")]


@pytest.mark.long
def test_a_dask_worker_has_one_process_at_a_time(temporary):
    with cluster_of(1, threads_per_worker=2) as client, concurrent.futures.ThreadPoolExecutor(1) as pool:
        call = pool.submit(on_dask, functions.sleep, 4, client=client, workers=1)
        eventually(lambda: any(client.run(tasks_of).values()), "taken")
        with pytest.raises(TimeoutError, match=r"Received: 1 in the cluster, 0 of them"):
            on_dask(functions.sleep, 0, client=client, workers=1, start_timeout_seconds=1)
        assert call.result(60) == [4]


@pytest.mark.long
def test_a_dask_worker_that_returns_at_its_port_is_lost(temporary, tmp_path):
    with ReservedPorts(3) as reserved:
        scheduler_port, *worker_ports = reserved.ports
    address = f"tcp://127.0.0.1:{scheduler_port}"
    scheduler = ["scheduler", "--host", "127.0.0.1", "--port", str(scheduler_port), "--dashboard-address", ":0"]
    worker = ["worker", address, "--nthreads", "1", "--no-dashboard", "--worker-port"]
    with contextlib.ExitStack() as stack:
        for arguments in (scheduler, *([*worker, str(port)] for port in worker_ports)):
            command = [sys.executable, "-m", f"distributed.cli.dask_{arguments[0]}", *arguments[1:]]
            process = stack.enter_context(subprocess.Popen(command, stderr=subprocess.DEVNULL))
            stack.callback(process.terminate)
        client = stack.enter_context(distributed.Client(address, timeout=60, set_as_default=False))
        client.wait_for_workers(2, timeout=60)
        names = set(client.scheduler_info()["workers"])
        call = functions.lose_first_place_once, TestOnDask.owner, str(tmp_path / "killed")
        assert on_dask(*call, client=client, workers=2, max_restarts=1) == [0, 1]
        assert set(client.scheduler_info()["workers"]) == names


@pytest.mark.long
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_connections_of_dask_with_tls(temporary, tmp_path):
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=dask", "-days", "2"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    files = {f"tls_{role}_{kind}": path for role in ROLES for kind, path in (("cert", certificate), ("key", key))}
    security = distributed.Security(tls_ca_file=certificate, require_encryption=True, **files)
    with cluster_of(2, security=security, threads_per_worker=2) as client:
        assert client.scheduler.address.startswith("tls://")
        assert on_dask(functions.task_and_threads, 10, workers=2) == [("worker", 0, "2"), ("worker", 10, "2")]


ROLES = ("client", "scheduler", "worker")


@pytest.mark.long
def test_adaptive_clusters_keep_the_workers_that_train(temporary):
    with cluster_of(0) as client:
        with pytest.raises(TimeoutError, match=r"Received: 0 in the cluster, 0 of .* or cluster\.adapt\(minimum=2\)"):
            on_dask(functions.sleep, 0, workers=2, start_timeout_seconds=1)
        client.cluster.adapt(minimum=3, maximum=3, interval="100ms", wait_count=1)
        client.wait_for_workers(3, timeout=60)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            call = pool.submit(on_dask, functions.sleep, 8, client=client, workers=2)
            eventually(lambda: sum(map(bool, client.run(tasks_of).values())) == 2, "taken")
            client.cluster.adapt(minimum=0, maximum=3, interval="100ms", wait_count=1)
            eventually(lambda: len(client.scheduler_info()["workers"]) == 2, "the idle one has ended")
            assert call.result(60) == [8, 8]
