"""Elastic calls of engines: who is lost starts again alone while the others go on. The places are threads here."""

import dataclasses
import signal
import types

import pytest
from test_rounds import call_of, result
from thread_places import run_in_threads

from tfdist.cluster import LOST_RUN_EXIT_CODE, PREEMPTED_EXIT_CODE
from tfdist.launch import WorkerError
from tfdist.launch.engines import engine_call as module
from tfdist.launch.engines import on_ray as on_ray_module
from tfdist.launch.engines.engine_call import LostPlaceError, PlaceAddress, RoundEnd, run_rounds
from tfdist.launch.engines.place import _Stop, place_address, run_place

KILLED = 128 + signal.SIGKILL


def return_after_loss(directory, victim, generation):
    """Kills its ancestor in the worker `victim`, once; all return how often they were called when it is back."""
    import json
    import os
    import time
    from pathlib import Path

    from engine_functions import ancestor

    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    path = Path(directory) / f"worker-{rank}"
    with path.open("a") as file:
        file.write("x")
    if rank == victim and path.read_text() == "x":
        while len(list(Path(directory).glob("worker-*"))) < 2:
            time.sleep(0.02)
        os.kill(ancestor(generation), 9)
        time.sleep(60)
    while not (Path(directory) / f"worker-{victim}").exists() or (
        (Path(directory) / f"worker-{victim}").read_text() != "xx"
    ):
        time.sleep(0.02)
    return len(path.read_text()), int(os.environ["TFDIST_ATTEMPT"])


@pytest.mark.parametrize(
    ("victim", "generation", "said"),
    [
        pytest.param(1, 0, "attempt 0: 2 workers", marks=pytest.mark.long),
        pytest.param(1, 1, "training continues without worker 1", marks=pytest.mark.long),
        (0, 1, "the launcher of place 0 was ended by SIGKILL; it starts again"),
    ],
    ids=["worker", "launcher", "launcher-with-rendezvous"],
)
def test_who_is_killed_starts_again_while_the_others_go_on(tmp_path, victim, generation, said):
    lines = []
    call = call_of(return_after_loss, str(tmp_path), victim, generation, elastic=1)
    values = run_rounds(call, lambda call: run_in_threads(call, show=lines.append), say=pytest.fail)
    assert values == [((2 if rank == victim else 1), 0) for rank in (0, 1)]
    assert any(said in line for line in lines), lines


def test_a_place_that_is_lost_for_good_has_no_value():
    call = call_of(lambda: 7, elastic=1)
    assert run_rounds(call, lambda call: [result(0, 0), result(1, LOST_RUN_EXIT_CODE)]) == [7, None]

    def lose(call):
        raise LostPlaceError("place 1 was lost", [result(0, 0)])

    assert run_rounds(call, lose, say=pytest.fail) == [7, None]
    with pytest.raises(WorkerError, match="no restart is left"):
        run_rounds(call, lambda call: [result(0, LOST_RUN_EXIT_CODE), result(1, KILLED)])


def test_the_others_are_stopped_when_no_place_can_be_back(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    call = call_of(lambda: 7, workers=3, elastic=1, grace_seconds=5, start_timeout_seconds=100)
    assert RoundEnd(call_of(lambda: 7, workers=3)).has_come([result(1, KILLED)])
    end = RoundEnd(call)
    absent = dataclasses.replace(result(2, LOST_RUN_EXIT_CODE), is_absent=True)
    assert not end.has_come([]) and not end.has_come([result(1, KILLED), absent])
    now[0] = 1000.0
    assert not end.has_come([result(1, KILLED)]), "the others train on"
    assert not end.has_come([result(1, 0)]), "place 2 may have more to do, if the rendezvous is lost"
    now[0] = 1099.0
    assert not end.has_come([result(1, 0)])
    assert not end.has_come([result(1, 0), result(2, 0)]), "place 0 alone is left"
    now[0] = 1100.0
    assert end.has_come([result(1, 0), result(2, 0)])
    end = RoundEnd(call)
    assert not end.has_come([result(0, PREEMPTED_EXIT_CODE)])
    now[0] += 15.0
    assert end.has_come([result(0, PREEMPTED_EXIT_CODE)]), "who reaches the rendezvous ends with it"


def test_a_place_that_returns_too_late_is_no_error_of_the_call():
    """The rendezvous is gone: the others have ended."""
    call = call_of(lambda: 7, elastic=1, start_timeout_seconds=0.5)
    addresses = [place_address("127.0.0.1") for _ in range(2)]
    place = run_place(call.task(1, addresses), is_again=True)
    assert place.is_absent and place.is_interrupted and not place.usage_error
    assert "The rendezvous did not answer." in place.last_lines[0]


def test_a_place_that_leaves_is_killed():
    """SIGTERM to its launcher would end all, so it must not come either where both are true."""
    sent = []

    class Launcher:
        send_signal = staticmethod(sent.append)

    for options, expected in (({"elastic": 1}, signal.SIGKILL), ({}, signal.SIGTERM)):
        task = call_of(lambda: 7, **options).task(1, [place_address("127.0.0.1")] * 2)
        _Stop(task, Launcher(), lambda: True, lambda: True).poll()
        assert sent.pop() == expected and not sent


def test_an_actor_on_another_host_does_not_join(monkeypatch):
    """Workers keep their addresses."""
    util = types.SimpleNamespace(get_node_ip_address=lambda: "10.0.0.9")
    monkeypatch.setattr(on_ray_module, "import_ray", lambda: types.SimpleNamespace(util=util))
    task = call_of(lambda: 7, elastic=1).task(1, [PlaceAddress("10.0.0.1", 1), PlaceAddress("10.0.0.2", 2)])
    moved = on_ray_module._Place(1)
    place = moved.run(task)
    assert place.is_absent and place.is_interrupted and not RoundEnd(call_of(lambda: 7, elastic=1)).has_come([place])
    assert moved.lines() == [f"tfdist: {place.last_lines[0]}"]
    assert place.last_lines[0].startswith("place 1 was lost on 10.0.0.2 and is now on 10.0.0.9, but workers keep their")


def test_actors_that_are_not_started_again_are_silent(monkeypatch):
    now, lost = [100.0], set()
    monkeypatch.setattr(on_ray_module.time, "monotonic", lambda: now[0])
    ray = types.SimpleNamespace(
        wait=lambda refs, **_: ([ref for ref in refs if ref not in lost], []),
        get=lambda ref: [],
        exceptions=types.SimpleNamespace(RayError=OSError),
    )
    monkeypatch.setattr(on_ray_module, "import_ray", lambda: ray)

    class Actor:
        def __init__(self, rank):
            self.lines = types.SimpleNamespace(remote=lambda: rank)

    output = on_ray_module.OutputOfActors([Actor(rank) for rank in range(2)])
    lost.add(1)
    now[0] = 107.0
    output.show_new()
    now[0] = 110.0
    assert output.silent_seconds([0, 1], since=100.0) == 3.0
    assert output.silent_seconds([1], since=100.0) == 10.0
