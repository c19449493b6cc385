"""What ends a round, and what a call does then: places that are stopped, launchers that are killed, a lost port."""

import signal
import socket

import pytest
from engine_runs import eventually
from test_rounds import call_of, is_alive
from thread_places import run_in_threads

from tfdist.cluster import LOST_RUN_EXIT_CODE, PREEMPTED_EXIT_CODE
from tfdist.launch import WorkerError
from tfdist.launch.engines import place as place_module
from tfdist.launch.engines.engine_call import PlaceResult, run_rounds
from tfdist.launch.engines.place import _Stop, place_address, run_place
from tfdist.launch.function_call.worker_results import RankResult
from tfdist.utils.argument_checks import UsageError

SEVEN = RankResult(value=b"\x80\x04K\x07.")
STOPPED = 128 + signal.SIGTERM


def once(directory, action):
    """Does something in worker 1 in the first round only; all return their attempt."""
    import json
    import os
    import time
    from pathlib import Path

    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    first = Path(directory, f"worker-{rank}")
    is_first = not first.exists()
    first.touch()
    while len(list(Path(directory).glob("worker-*"))) < 2:
        time.sleep(0.02)
    if is_first and rank == 1:
        action()
    if is_first:
        time.sleep(60)
    return rank


def kill_launcher():
    import os

    os.kill(os.getppid(), 9)


@pytest.fixture
def rounds_said():
    return []


def test_a_place_that_is_stopped_is_replaced_although_the_function_saves_nothing(tmp_path, rounds_said):
    call = call_of(once, str(tmp_path), lambda: None, max_restarts=1)

    def run_round(call):
        is_first = call.round == 0
        return run_in_threads(call, should_stop=lambda: is_first and len(list(tmp_path.glob("worker-*"))) == 2)

    assert run_rounds(call, run_round, say=rounds_said.append) == [0, 1]
    assert len(rounds_said) == 1 and "SIGTERM" in rounds_said[0]


def test_a_launcher_that_is_killed_is_replaced_at_once(tmp_path, rounds_said):
    call = call_of(once, str(tmp_path), kill_launcher, max_restarts=1)
    assert run_rounds(call, run_in_threads, say=rounds_said.append) == [0, 1]
    assert len(rounds_said) == 1 and "the launcher of place 1 was ended by SIGKILL" in rounds_said[0]


def test_a_port_that_another_process_takes_is_replaced_and_is_no_restart(rounds_said):
    with socket.socket() as other:

        def take_first(addresses):
            if not other.getsockname()[1]:
                other.bind(("127.0.0.1", addresses[0].port))
                other.listen()

        call = call_of(lambda: 7)
        values = run_rounds(call, lambda call: run_in_threads(call, on_addresses=take_first), say=rounds_said.append)
    assert values == [7, 7]
    assert len(rounds_said) == 1 and "has taken the port" in rounds_said[0]


def result(rank, code, *, attempt=None, attempts=1, usage_error="", **cause):
    failure = None
    if attempt is not None:
        failure = {"attempt": attempt, "cause": {"rank": rank, "description": "how", **cause}, "earlier": []}
    values = {} if code else {(0, rank): SEVEN}
    return PlaceResult(rank, code, values, failure, ("tfdist: why",), usage_error, attempts)


def test_ports_are_not_tried_for_ever():
    outcomes = [[result(0, 2, usage_error="The coordinator cannot listen. Received: port 1")]] * 4
    left = list(outcomes)
    with pytest.raises(UsageError, match="cannot listen"):
        run_rounds(call_of(lambda: 7), lambda call: left.pop(0), say=lambda line: None)
    assert left == []


def test_a_rejected_command_is_no_lost_place():
    outcome = [result(0, STOPPED), result(1, 2, usage_error="The log files cannot be created.")]
    with pytest.raises(UsageError, match="log files"):
        run_rounds(call_of(lambda: 7, max_restarts=3), lambda call: outcome)


@pytest.mark.parametrize(
    "of_function",
    [
        result(0, LOST_RUN_EXIT_CODE, attempt=0, exit_code=LOST_RUN_EXIT_CODE),
        result(0, STOPPED, attempt=0, exit_code=None, signal="SIGTERM"),
        result(0, 137, attempt=0, exit_code=None, signal="SIGKILL"),
        result(0, 3, attempt=0, exit_code=3),
        result(0, 200, attempt=0, exit_code=200),
    ],
)
def test_an_exit_of_the_function_is_no_lost_place(of_function):
    with pytest.raises(WorkerError, match="Worker 0 of 1 failed"):
        run_rounds(call_of(lambda: 7, workers=1, max_restarts=3), lambda call: [of_function])


@pytest.mark.parametrize(
    "of_place",
    [
        result(0, LOST_RUN_EXIT_CODE),
        result(0, LOST_RUN_EXIT_CODE, attempt=0, attempts=2, exit_code=LOST_RUN_EXIT_CODE),  # of an earlier attempt
        result(0, PREEMPTED_EXIT_CODE, attempt=0, exit_code=PREEMPTED_EXIT_CODE),
        result(0, STOPPED),
        result(0, 128 + signal.SIGUSR1),
        result(0, -signal.SIGKILL),
        result(0, 128 + signal.SIGKILL),  # of the process that forwards signals to the launcher
    ],
)
def test_a_place_that_leaves_is_replaced(of_place):
    left = [[of_place], [result(0, 0)]]
    assert run_rounds(call_of(lambda: 7, workers=1, max_restarts=3), lambda call: left.pop(0), say=print) == [7]


def test_each_attempt_of_a_lost_round_is_a_restart():
    """Attempt 0 has failed, attempt 1 was running when the place was lost: a new round would be the second restart."""
    left = [[result(0, LOST_RUN_EXIT_CODE, attempt=0, attempts=2)], [result(0, 0)]]
    with pytest.raises(WorkerError, match="no restart is left"):
        run_rounds(call_of(lambda: 7, workers=1, max_restarts=1), lambda call: left.pop(0), say=print)


def test_a_place_counts_attempts():
    [place] = run_in_threads(call_of(killed_once, workers=1, max_restarts=1))
    assert (place.exit_code, place.attempts, place.used_attempts) == (0, 2, 2)


def killed_once():
    import os

    if os.environ["TFDIST_ATTEMPT"] == "0":
        os.kill(os.getpid(), 9)


def test_the_place_that_knows_the_failure_describes_it():
    outcome = [result(0, 1), result(1, 1, attempt=0, exit_code=1), result(2, 1)]
    with pytest.raises(WorkerError, match="Worker 1 of 2 failed: how"):
        run_rounds(call_of(lambda: 7), lambda call: outcome)


def test_a_launcher_that_does_not_end_is_killed_after_the_grace_period(monkeypatch):
    now, sent = [100.0], []
    monkeypatch.setattr(place_module.time, "monotonic", lambda: now[0])

    class Launcher:
        send_signal = staticmethod(sent.append)

    task = call_of(lambda: 7, workers=1, grace_seconds=7).task(0, [place_address("127.0.0.1")])
    stop = _Stop(task, Launcher(), lambda: now[0] >= 101)
    stop.poll()
    assert sent == []
    now[0] = 101.0
    stop.poll()
    now[0] = 108.0  # the launcher itself kills workers then, and may need time to say so
    stop.poll()
    assert sent == [signal.SIGTERM]
    now[0] = 130.0
    stop.poll()
    assert sent == [signal.SIGTERM, signal.SIGKILL]


def test_a_frozen_launcher_is_killed_with_its_worker(tmp_path, monkeypatch):
    monkeypatch.setattr(place_module, "_KILL_SECONDS", 0)
    frozen = tmp_path / "frozen"
    call = call_of(freeze_launcher, str(frozen), workers=1, grace_seconds=1)
    [place] = run_in_threads(call, should_stop=frozen.exists)
    assert place.exit_code == -signal.SIGKILL
    for pid in frozen.read_text().split():
        eventually(lambda pid=pid: not is_alive(int(pid)), "ended", 10)


def freeze_launcher(path):
    import os
    import signal
    import time
    from pathlib import Path

    text = Path(f"{path}.new")
    text.write_text(f"{os.getppid()} {os.getpid()}")
    os.kill(os.getppid(), signal.SIGSTOP)
    text.rename(path)
    time.sleep(100)


def test_the_environment_of_a_worker(monkeypatch):
    """A task of `srun` that is a process of an engine is no worker; the rendezvous' token is the launchers' alone."""
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_PROCID", "1")
    names = ("SLURM_STEP_ID", "SLURM_PROCID", "TFDIST_TOKEN", "CUDA_VISIBLE_DEVICES")
    task = call_of(environment, names, workers=1).task(0, [place_address("127.0.0.1")])
    place = run_place(task, environ={"CUDA_VISIBLE_DEVICES": "3"})
    ((*slurm, token, devices),) = run_rounds(call_of(environment, names, workers=1), lambda call: [place])
    assert (slurm, devices) == ([None, None], "3")
    assert token != task.token


def environment(names):
    import os

    return [os.environ.get(name) for name in names]
