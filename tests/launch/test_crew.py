"""The processes of an attempt, where one takes the place of another."""

import signal

import pytest

from tfdist.launch import crew as crew_module
from tfdist.launch.crew import Crew
from tfdist.launch.roles import with_parameter_servers

CHIEF, WORKER, SERVER = with_parameter_servers(1, 1)


class Process:
    """A process whose leftovers the test ends."""

    made = 0

    def __init__(self, rank, command, environ):
        Process.made += 1
        self.rank, self.command, self.pid = rank, command, Process.made
        self.returncode, self.is_empty, self.is_closed, self.told = None, False, False, []

    def is_gone(self):
        return self.returncode is not None and self.is_empty

    def tell(self, number):
        self.told.append(number)

    def close(self):
        self.is_closed = True


class Guardian:
    def __init__(self):
        self.watched = set()

    def watch(self, group):
        self.watched.add(group)

    def forget(self, group):
        self.watched.discard(group)


class Spares:
    def hire(self, rank, environ):
        return Process(rank, "script", environ)


@pytest.fixture
def guardian():
    return Guardian()


@pytest.fixture
def crew(monkeypatch, guardian):
    monkeypatch.setattr(crew_module, "WorkerProcess", Process)
    return Crew(guardian, Spares(), keeps_spares=False)


def test_chief_runs_the_script_and_the_others_serve(crew):
    commands = [crew.hire(rank, {}, role).command for rank, role in enumerate((CHIEF, WORKER, SERVER))]
    assert commands[0] == "script"
    assert all(command[-1] == "tfdist.parameter_server" for command in commands[1:])


def test_new_worker_takes_the_place_of_the_former(crew):
    chief, former = crew.hire(0, {}, CHIEF), crew.hire(1, {}, WORKER)
    former.returncode = -9
    new = crew.hire(1, {}, WORKER)
    assert crew.workers == [chief, new] and former.is_closed


def test_what_the_former_left_behind_is_waited_for_and_told(crew, guardian):
    former = crew.hire(0, {}, WORKER)
    former.returncode = -9
    new = crew.hire(0, {}, WORKER)
    new.returncode, new.is_empty = 0, True
    assert not crew.are_gone()
    crew.tell(signal.SIGKILL)
    assert former.told == [signal.SIGKILL]
    former.is_empty = True
    assert crew.are_gone() and not guardian.watched


def test_those_that_run_the_script_can_be_told_alone(crew):
    chief, worker, server = (crew.hire(rank, {}, role) for rank, role in enumerate((CHIEF, WORKER, SERVER)))
    crew.tell(signal.SIGTERM, only_script=True)
    assert (chief.told, worker.told, server.told) == ([signal.SIGTERM], [], [])
    assert crew.runs_script and not crew.is_alike
    chief.returncode = 0
    assert not crew.runs_script


def test_it_may_be_told_between_any_two_instructions_of_a_hire(crew):
    """The handler of a second Ctrl-C does so."""

    class Workers(list):
        def append(self, worker):
            super().append(worker)
            crew.tell(signal.SIGKILL)

    crew.workers = Workers()
    assert crew.hire(0, {}, CHIEF).told == [signal.SIGKILL]
