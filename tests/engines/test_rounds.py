"""What all engines share: the call, its places, and rounds after lost places. The places are threads here."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_runs import eventually
from thread_places import run_in_threads

from tfdist.cluster import LOST_RUN_EXIT_CODE, PREEMPTED_EXIT_CODE
from tfdist.launch import WorkerError
from tfdist.launch.engines.engine_call import EngineCall, LostPlaceError, PlaceAddress, PlaceResult, run_rounds
from tfdist.launch.engines.place import place_address, run_place, stop_places
from tfdist.launch.function_call.worker_results import RankResult

ADDRESSES = [PlaceAddress("10.0.0.1", 4000), PlaceAddress("fd00::2", 4001)]


def where(scale):
    import json
    import os

    config = json.loads(os.environ["TF_CONFIG"])
    print(f"task {config['task']['index']}")  # in one write
    if scale < 0 and config["task"]["index"] == 1:
        raise KeyError("no such column")
    return config["task"]["type"], scale * len(config["cluster"]["worker"]), os.environ["OMP_NUM_THREADS"]


def drawn():
    import json
    import os
    import random

    import numpy as np

    config = json.loads(os.environ["TF_CONFIG"])
    return config["task"]["index"], os.environ["TFDIST_SEED"], random.random(), np.random.random()


def wait_for_signal(started):
    import signal
    import sys
    from pathlib import Path

    signal.signal(signal.SIGTERM, lambda *_: (Path(f"{started}.saved").touch(), sys.exit(75)))
    Path(started).touch()
    time.sleep(300)


def call_of(function, *arguments, **options):
    return EngineCall.of(function, arguments, caller="on_x", **{"workers": 2, **options})


def left_places(directory):
    return sorted(path.name for path in Path(directory).glob("tfdist-place-*"))


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield tmp_path
    assert left_places(tmp_path) == []


def test_values_by_rank_and_the_output_of_all_places():
    lines = []
    values = run_rounds(call_of(where, 10), lambda call: run_in_threads(call, show=lines.append))
    assert values == [("worker", 20, "1")] * 2
    assert {"[0] task 0", "[1] task 1"} <= set(lines)
    assert sum("attempt 0: 2 workers" in line for line in lines) == 1, "the launchers of all places say the same"


def test_workers_of_a_call_draw_the_same_numbers_and_those_of_a_seed_again():
    seeded, again = (run_rounds(call_of(drawn, seed=7), run_in_threads) for _ in range(2))
    (other,) = run_rounds(call_of(drawn, workers=1), run_in_threads)
    assert [rank for rank, *_ in seeded] == [0, 1] and seeded == again
    assert seeded[0][1:] == seeded[1][1:] and seeded[0][1] == "7"
    assert other[1:] != seeded[0][1:]


def test_a_chief_alone_calls_the_function():
    assert run_rounds(call_of(where, 10, chief=True), run_in_threads) == [("chief", 20, "1")]


def test_the_error_has_the_rank_and_the_users_lines():
    with pytest.raises(WorkerError) as caught:
        run_rounds(call_of(where, -1), run_in_threads)
    assert caught.value.rank == 1
    assert str(caught.value).startswith("Worker 1 of 2 failed: KeyError: 'no such column'\n")
    assert 'raise KeyError("no such column")' in caught.value.traceback


def test_stopped_places_let_the_function_save(tmp_path):
    call, started = call_of(wait_for_signal, str(tmp_path / "started"), workers=1), tmp_path / "started"
    results = run_in_threads(call, should_stop=started.exists)
    assert (tmp_path / "started.saved").exists()
    assert results[0].exit_code != 0 and results[0].results == {}
    stop_places(call.run)  # from here on a place of this round ends at once
    assert run_in_threads(call)[0].exit_code != 0


@pytest.mark.parametrize("is_elastic", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_killed_place_leaves_no_process_and_no_file(tmp_path, is_elastic):
    call, started = call_of(wait_for_signal, str(tmp_path / "started"), workers=1), tmp_path / "started"
    environ = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    place = subprocess.Popen([sys.executable, "-c", PLACE], env=environ, stdin=subprocess.PIPE)
    with place.stdin as stdin:
        task = call.task(0, [place_address("127.0.0.1")])
        pickle.dump(dataclasses.replace(task, is_elastic=is_elastic), stdin)
    try:
        eventually(started.exists, "started")
        descendants = descendants_of(place.pid)
        assert len(descendants) >= 3 and left_places(tmp_path) != []
    finally:
        place.kill()
        place.wait()
    eventually(lambda: not any(map(is_alive, descendants)), "all have ended")
    saved = (tmp_path / "started.saved").exists()
    assert saved != is_elastic, "the worker had time to save, or it was killed: SIGTERM would end all workers"


PLACE = """
import pickle, sys
from tfdist.launch.engines.place import run_place
run_place(pickle.load(sys.stdin.buffer), is_killed=True)
"""


def children(pid):
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:  # it has just ended
        return []
    return [int(child) for child in text.split()]


def descendants_of(pid):
    found = children(pid)
    return found + [descendant for child in found for descendant in descendants_of(child)]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def result(rank, exit_code, *, failed_attempts=0, last_lines=("why",)):
    failure = None
    if failed_attempts:
        cause = {"rank": 1, "description": "worker 1: killed by SIGKILL", "signal": "SIGKILL", "last_lines": []}
        failure = {"attempt": failed_attempts - 1, "cause": cause, "earlier": []}
    value = {} if exit_code else {(0, rank): RankResult(value=b"\x80\x04K\x07.")}
    return PlaceResult(rank, exit_code, value, failure, tuple(last_lines))


def rounds(*outcomes):
    """Returns a `run_round` with these outcomes, and the calls that it has got."""
    calls, left = [], list(outcomes)

    def run_round(call):
        calls.append(call)
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return run_round, calls


GOOD = [result(0, 0), result(1, 0)]


@pytest.mark.parametrize(
    ("lost", "left"),
    [
        (LostPlaceError("place 1 (b) was lost: killed"), 2),
        (LostPlaceError("place 1 (b) was lost: killed", [result(0, LOST_RUN_EXIT_CODE, failed_attempts=2)]), 1),
        ([result(0, LOST_RUN_EXIT_CODE), result(1, LOST_RUN_EXIT_CODE)], 2),
        ([result(0, PREEMPTED_EXIT_CODE), result(1, PREEMPTED_EXIT_CODE)], 2),
    ],
)
def test_lost_places_lead_to_another_round(lost, left):
    said = []
    run_round, calls = rounds(lost, GOOD)
    assert run_rounds(call_of(where, 1, max_restarts=3), run_round, say=said.append) == [7, 7]
    assert [call.spec.max_restarts for call in calls] == [3, left]
    assert len({call.run for call in calls}) == 2
    assert len(said) == 1 and f"({left} restart" in said[0]


def test_a_value_whose_class_is_missing_here_is_an_error_of_its_worker():
    value = b"cno_such_module\nThing\n."
    with pytest.raises(WorkerError, match="cannot be read here. Received: ModuleNotFoundError") as caught:
        run_rounds(
            call_of(where, 1, workers=1), lambda call: [PlaceResult(0, 0, {(0, 0): RankResult(value)}, None, ())]
        )
    assert caught.value.rank == 0


def test_no_restart_is_left():
    run_round, calls = rounds(LostPlaceError("place 1 (b) was lost: killed"))
    with pytest.raises(WorkerError, match=r"no restart is left. Received: place 1 \(b\) was lost: killed\. Expected"):
        run_rounds(call_of(where, 1), run_round)
    assert len(calls) == 1


def test_a_failure_of_the_function_is_no_lost_place():
    run_round, calls = rounds([result(0, 137, failed_attempts=1), result(1, 137, failed_attempts=1)])
    with pytest.raises(WorkerError, match="Worker 1 of 2 failed: killed by SIGKILL"):
        run_rounds(call_of(where, 1, max_restarts=3), run_round)
    assert len(calls) == 1, "the supervisors have used the restarts"


def test_what_a_place_is_told():
    call = call_of(where, 1, max_restarts=3, log_dir="logs", grace_seconds=7, chief=True)
    arguments = " ".join(call.task(1, ADDRESSES, threads=4).arguments)
    assert "--node-rank 1 --rendezvous 10.0.0.1:4000 --address fd00::2" in arguments
    assert "--workers 1 --chief --nodes 2 " in arguments
    assert "--max-restarts 3 " in arguments and "--grace 7 --start-timeout 300" in arguments
    assert "--threads-per-worker 4" in arguments
    assert f"--log-dir {os.getcwd()}/logs" in arguments, "relative paths are those of the driver"
    assert "--rendezvous [fd00::2]:4001" in " ".join(call.task(1, ADDRESSES[::-1]).arguments)
    assert "--threads-per-worker 2" in " ".join(
        call_of(where, threads_per_worker=2).task(0, ADDRESSES, threads=4).arguments
    )
    assert "--nodes" not in call_of(where, workers=1).task(0, ADDRESSES[:1]).arguments
    own = " ".join(call_of(where, parameter_servers=2, start_timeout_seconds=9).task(0, ADDRESSES).arguments)
    assert "--parameter-servers 2" in own and "--start-timeout 9" in own
    assert "--elastic 1 " in " ".join(call_of(where, elastic=1).task(0, ADDRESSES).arguments)
    second = call.next_round(2)
    assert f"--log-dir {os.getcwd()}/logs/round-1" in " ".join(second.task(0, ADDRESSES).arguments)
    assert second.run != call.run and call.token[:4] not in call.run
    assert call.token not in repr(call) + repr(call.task(0, ADDRESSES)), "not in logs"


def test_likely_ports_differ_between_rounds_and_are_no_ports_of_clients():
    calls = [call_of(where)]
    for _ in range(20):
        calls.append(calls[-1].next_round(0))
    ports = {call.likely_port for call in calls}
    assert len(ports) > 15 and min(ports) >= 20_000 and max(ports) < 32_768
    assert calls[0].likely_port == calls[0].likely_port


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 0}, "Invalid `workers`. Received: workers=0"),
        ({"parameter_servers": -1}, "Invalid `parameter_servers`"),
        ({"max_restarts": 1.5}, "Invalid `max_restarts`"),
        ({"threads_per_worker": 0}, "Invalid `threads_per_worker`"),
        ({"grace_seconds": -1}, "Invalid `grace_seconds`"),
        ({"start_timeout_seconds": float("nan")}, "Invalid `start_timeout_seconds`"),
        ({"start_timeout_seconds": None}, "Invalid `start_timeout_seconds`"),
        (
            {"start_timeout_seconds": 0},
            "Invalid `start_timeout_seconds`. Received: start_timeout_seconds=0. Expected: a number",
        ),
        ({"elastic": 0}, "Invalid `elastic`"),
        ({"elastic": 3}, "exceeds the number of workers. Received: workers=2, elastic=3. Expected: elastic=2, or less"),
        ({"elastic": 1, "chief": True}, "Received: elastic=1 with chief=True, parameter_servers=0. Expected: one of"),
        ({"elastic": 1, "parameter_servers": 1}, "Only workers that all call the function train elastically"),
        ({"chief": True, "parameter_servers": 1}, "Parameter servers have a chief already. Received: chief=True"),
    ],
)
def test_invalid_options(options, words):
    with pytest.raises(ValueError, match=words):
        call_of(where, **options)


def test_a_launcher_that_rejects_its_command_is_an_error_of_the_call(monkeypatch):
    call = call_of(where, 1, workers=1)
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}})
    )
    with pytest.raises(ValueError, match="A cluster is described already"):
        run_rounds(call, run_in_threads)


def test_run_place_is_not_the_workers_group():
    """An interrupt of the driver's terminal reaches the driver alone: it decides what follows."""
    call = call_of(lambda: __import__("os").getsid(0), workers=1)
    [value] = run_rounds(call, lambda call: [run_place(call.task(0, [place_address("127.0.0.1")]))])
    assert value != os.getsid(0)


def test_a_place_with_another_python_says_so():
    call = call_of(where, 1, workers=1)
    versions = call.versions._replace(cloudpickle="2")
    with pytest.raises(
        ValueError, match=r"Received: Python 3\.\d+, cloudpickle 3, .* in /.* Expected: .*cloudpickle 2,"
    ):
        run_rounds(dataclasses.replace(call, versions=versions), run_in_threads)
