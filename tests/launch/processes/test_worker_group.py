"""The worker group, whose workers can be replaced."""

import signal

import pytest

from tfdist.launch.processes import worker_group
from tfdist.launch.processes.worker_group import GroupShutdown, WorkerGroup
from tfdist.launch.run_spec import run_roles

CHIEF, WORKER, SERVER = run_roles(1, parameter_servers=1).values()


class Process:
    """A process whose exit and remaining group the test decides."""

    made = 0

    def __init__(self, rank, command, environ):
        Process.made += 1
        self.rank, self.command, self.pid = rank, command, Process.made
        self.returncode, self.is_empty, self.is_closed, self.signals = None, False, False, []

    def is_gone(self):
        return self.returncode is not None and self.is_empty

    def send_signal(self, number):
        self.signals.append(number)

    def close(self):
        self.is_closed = True


class OrphanReaper:
    def __init__(self):
        self.watched = set()

    def watch(self, group):
        self.watched.add(group)

    def forget(self, group):
        self.watched.discard(group)


class WarmSpares:
    def __init__(self):
        self.closed = []

    def start_worker(self, rank, environ):
        return Process(rank, "script", environ)

    def close_connection(self, worker):
        self.closed.append(worker)


@pytest.fixture
def reaper():
    return OrphanReaper()


@pytest.fixture
def spares():
    return WarmSpares()


@pytest.fixture
def group(monkeypatch, reaper, spares):
    monkeypatch.setattr(worker_group, "WorkerProcess", Process)
    return WorkerGroup(reaper, spares, keeps_spares=False)


def test_chief_runs_the_script_and_the_others_serve(group):
    commands = [group.start(rank, {}, role).command for rank, role in enumerate((CHIEF, WORKER, SERVER))]
    assert commands[0] == "script"
    assert all(command[-1] == "tfdist.servers" for command in commands[1:])


def test_new_worker_replaces_the_former(group):
    chief, former = group.start(0, {}, CHIEF), group.start(1, {}, WORKER)
    former.returncode = -9
    new = group.start(1, {}, WORKER)
    assert group.workers == {0: chief, 1: new} and former.is_closed


def test_connection_to_a_spare_is_closed_when_another_process_replaces_it(group, spares):
    (role,) = run_roles(1, is_elastic=True).values()
    former = group.start(0, {}, role)
    former.returncode = -9
    group.start(0, {}, role)
    assert spares.closed == [former]


def test_children_of_the_former_worker_are_waited_for_and_signalled(group, reaper):
    former = group.start(0, {}, WORKER)
    former.returncode = -9
    new = group.start(0, {}, WORKER)
    new.returncode, new.is_empty = 0, True
    assert not group.is_gone()
    group.send_signal(signal.SIGKILL)
    assert former.signals == [signal.SIGKILL]
    former.is_empty = True
    assert group.is_gone() and not reaper.watched


def test_signal_to_those_that_run_the_script(group):
    chief, worker, server = (group.start(rank, {}, role) for rank, role in enumerate((CHIEF, WORKER, SERVER)))
    group.send_signal(signal.SIGTERM, only_script=True)
    assert (chief.signals, worker.signals, server.signals) == ([signal.SIGTERM], [], [])
    assert group.runs_script and not group.all_run_script
    chief.returncode = 0
    assert not group.runs_script


def test_signal_between_any_two_instructions_of_a_start(group):
    """The handler of a second Ctrl-C does so."""

    class Workers(dict):
        def __setitem__(self, rank, worker):
            super().__setitem__(rank, worker)
            group.send_signal(signal.SIGKILL)

    group.workers = Workers()
    assert group.start(0, {}, CHIEF).signals == [signal.SIGKILL]


def test_later_grace_period_does_not_postpone_the_kill(group):
    """A second reason to shut down, such as the failure of a worker that is saving, gives no more time."""
    worker = group.start(0, {}, CHIEF)
    shutdown = GroupShutdown(group)
    shutdown.terminate(1000.0)
    shutdown.kill_if_due()
    assert worker.signals == [signal.SIGTERM] and not shutdown.has_killed
    shutdown.terminate(0.0)
    shutdown.terminate(1000.0)
    shutdown.kill_if_due()
    assert shutdown.has_killed and worker.signals[-1] == signal.SIGKILL
