"""Workers of an elastic training start, join and get the state, and are lost or too late meanwhile."""

import threading
import time
from typing import Any

import numpy as np
import pytest
from thread_workers import Faults, ThreadWorker, ThreadWorkers, training, wait_until

from tfdist.exchange.joining import GroupJoin
from tfdist.exchange.result_log import ReplayError
from tfdist.membership import meeting, state_transfer, worker_membership
from tfdist.membership.meeting import Meeting
from tfdist.membership.membership_errors import JoinError
from tfdist.transport.transport_errors import ConnectionClosedError, HandshakeError

pytestmark = pytest.mark.long


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


def test_a_worker_that_is_lost_while_all_begin_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    join, lost = GroupJoin.join, []

    def join_or_end(self: GroupJoin, timeout_seconds: float) -> Any:
        connections = join(self, timeout_seconds)
        if self._rank == 1 and not lost and self._group_name == meeting._FIRST_GROUP:
            lost.append(connections)
            for connection in connections.control.values():
                connection.close()
            raise OSError("it ends")
        return connections

    monkeypatch.setattr(GroupJoin, "join", join_or_end)
    workers = ThreadWorkers(3)
    try:
        first = workers.start(1)
        for rank in (0, 2):
            workers.start(rank)
        first.thread.join(30)
        assert "it ends" in str(first.error)
        workers.start(1)
        workers.wait_for_steps(0, 1, 2)
        workers.finish()
    finally:
        workers.close()


def test_a_worker_is_lost_before_the_first_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others do not wait for it for the time that a start may take."""
    workers = ThreadWorkers(3)

    def wait_and_end(worker: ThreadWorker) -> None:
        wait_until(lambda: len([w for w in workers.all if hasattr(w, "group")]) == 3, "all have begun")
        worker.group.close()
        raise OSError("it ends")

    try:
        workers.start(0)
        workers.start(2)
        victim = workers.start(1, before_exchange=wait_and_end)
        began = time.monotonic()
        for rank in (0, 2):
            workers.of_rank(rank).thread.join(60)
            assert "is lost" in str(workers.of_rank(rank).error)
        assert time.monotonic() - began < 20
        assert "it ends" in str(victim.error)
    finally:
        workers.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_with_another_token_does_not_join(rank: int) -> None:
    with training(2) as workers:
        workers.of_rank(rank).kill()
        workers.wait_for_steps(1 - rank)
        stranger = workers.start(rank, token="another")
        stranger.thread.join(20)
        assert isinstance(stranger.error, HandshakeError), repr(stranger.error)
        workers.start(rank)
        workers.wait_for_steps(0, 1)
        workers.finish()


def test_a_worker_joins_when_all_have_just_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with training(2, silence_seconds=2.0) as workers:
        workers.of_rank(1).kill()
        workers.wait_for_steps(0)
        join = Meeting.join

        def join_alone(self: Meeting, number: int) -> None:
            workers.of_rank(0).kill()
            join(self, number)

        monkeypatch.setattr(Meeting, "join", join_alone)
        late = workers.start(1)
        late.thread.join(25)
        assert isinstance(late.error, JoinError), repr(late.error)


def test_all_end_while_a_worker_waits_for_the_state() -> None:
    with training(2) as workers:
        workers.of_rank(1).kill()
        workers.wait_for_steps(0)
        donor, gate = workers.of_rank(0), threading.Event()
        donor.before_state = lambda: gate.wait(60)
        late = workers.start(1)
        wait_until(lambda: donor.group.donor.is_sending, "the state is wanted")
        donor.last_step = donor.membership.committed_steps + 2
        donor.thread.join(30)
        gate.set()
        late.thread.join(25)
        assert isinstance(late.error, JoinError), repr(late.error)
        workers.check()


def _held_donor(workers: ThreadWorkers, gate: threading.Event) -> ThreadWorker:
    """Starts worker 1; returns the first that is to send it the state, and waits for `gate` before it does."""
    asked: list[ThreadWorker] = []
    for worker in workers.trained:
        worker.before_state = lambda worker=worker: asked.append(worker) or (worker is asked[0] and gate.wait(60))
    workers.start(1)
    wait_until(lambda: asked, "a worker is asked for its state")
    return asked[0]


def test_a_worker_that_sends_its_state_is_lost() -> None:
    with training(3) as workers:
        workers.of_rank(1).kill()
        workers.wait_for_steps(0, 2)
        gate = threading.Event()
        donor = _held_donor(workers, gate)
        donor.kill()
        gate.set()
        workers.wait_for_steps(*({0, 1, 2} - {donor.rank}))
        workers.finish()


def test_a_worker_that_sends_its_state_is_frozen(faults: Faults) -> None:
    with training(4, silence_seconds=1.0) as workers:
        workers.of_rank(1).kill()
        workers.wait_for_steps(0, 2, 3)
        gate = threading.Event()
        donor = _held_donor(workers, gate)
        others = tuple({0, 1, 2, 3} - {donor.rank})
        faults.separate((donor.rank,), others)
        workers.wait_for_steps(*others)
        gate.set()
        workers.finish()


def test_a_worker_whose_state_cannot_be_sent_trains_on_and_says_why() -> None:
    with training(2) as workers:
        workers.of_rank(1).kill()
        workers.wait_for_steps(0)
        workers.of_rank(0).refusal = "data without a position"
        late = workers.start(1)
        late.thread.join(25)
        assert isinstance(late.error, JoinError), repr(late.error)
        assert "the answer of worker 0: data without a position" in str(late.error)
        workers.wait_for_steps(0)
        workers.finish()


def test_a_worker_that_gets_no_state_says_so(faults: Faults) -> None:
    with training(2) as workers:
        workers.of_rank(1).kill()
        workers.wait_for_steps(0)
        gate = threading.Event()
        workers.of_rank(0).after_exchange = lambda: gate.wait(60)
        late = workers.start(1, timeout_seconds=1.0)
        late.thread.join(25)
        gate.set()
        assert isinstance(late.error, TimeoutError) and "makes a step" in str(late.error), repr(late.error)
        workers.wait_for_steps(0)
        workers.finish()


def test_a_worker_that_is_too_far_behind_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_transfer, "_LEAST_QUEUED_BYTES", 1000)
    monkeypatch.setattr(state_transfer, "_MAX_QUEUED_STATES", 4)
    with training(2) as workers:
        workers.of_rank(1).kill()
        workers.wait_for_steps(0)
        donor = workers.of_rank(0)
        sending, gate = state_transfer._Transfer._send, threading.Event()

        def send_slowly(transfer: Any, message: Any, buffers: Any) -> None:
            if "results" in message:
                gate.wait(60)
            sending(transfer, message, buffers)

        monkeypatch.setattr(state_transfer._Transfer, "_send", send_slowly)
        late = workers.start(1)
        late.thread.join(30)
        gate.set()
        assert isinstance(late.error, JoinError), repr(late.error)
        assert not donor.group.donor.is_sending
        workers.wait_for_steps(0)
        workers.finish()


def test_a_worker_that_makes_other_exchanges_does_not_join() -> None:
    with training(2) as workers:
        workers.of_rank(1).kill()
        workers.wait_for_steps(0)
        other = workers.start(1)
        other.exchanges_of_step = 2
        other.thread.join(30)
        assert isinstance(other.error, ReplayError), repr(other.error)
        workers.wait_for_steps(0)
        workers.finish()


def test_a_connection_that_was_made_by_half_proves_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker that joins has not got the answer, and asks again: to the other one it has not ended."""
    ask, broken = Meeting._ask, []

    def ask_or_break(self: Meeting, rank: int, message: dict[str, Any]) -> Any:
        connection, answer = ask(self, rank, message)
        if "number" in message and not broken:
            time.sleep(0.1)  # the other one takes it
            broken.append(connection)
            connection.close()
            raise ConnectionClosedError("no answer in time")
        return connection, answer

    with training(2) as workers:
        workers.of_rank(1).kill()
        workers.wait_for_steps(0)
        monkeypatch.setattr(Meeting, "_ask", ask_or_break)
        workers.start(1)
        workers.wait_for_steps(0, 1)
        assert broken
        workers.finish()


def test_a_worker_whose_clock_is_wrong_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    with training(3) as workers:
        for rank in (1, 0):
            workers.of_rank(rank).kill()
            workers.wait_for_steps(*({0, 1, 2} - {rank}))
            monkeypatch.setattr(meeting.time, "time", lambda: 0.0)
            workers.start(rank)
            workers.wait_for_steps(0, 1, 2)
        workers.finish()


def test_a_worker_that_is_older_than_one_that_trains_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number is smaller: the other one connects with it, once it is asked to."""
    with training(3) as workers:
        workers.of_rank(1).kill()
        workers.wait_for_steps(0, 2)
        monkeypatch.setattr(worker_membership, "new_number", lambda rank, ranks, newest: rank + ranks)
        workers.of_rank(2).kill()
        workers.wait_for_steps(0)
        monkeypatch.setattr(
            "tfdist.membership.worker_membership.new_number", lambda rank, ranks, newest: rank + 9 * ranks
        )
        workers.start(1)
        workers.wait_for_steps(0, 1)
        monkeypatch.setattr(
            "tfdist.membership.worker_membership.new_number", lambda rank, ranks, newest: rank + 5 * ranks
        )
        workers.start(2)
        workers.wait_for_steps(0, 1, 2)
        workers.finish()


def test_a_worker_that_cannot_connect_with_all_does_not_replay_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    with training(3) as workers:
        workers.of_rank(2).kill()
        workers.wait_for_steps(0, 1)
        monkeypatch.setattr("tfdist.membership.agreement._REFUSED_SECONDS", 0.05)
        ask = Meeting._ask

        def ask_one(self: Meeting, rank: int, message: dict[str, Any]) -> Any:
            if rank == 1 and "number" in message:
                raise ConnectionClosedError("no route")
            return ask(self, rank, message)

        monkeypatch.setattr(Meeting, "_ask", ask_one)
        late = workers.start(2)
        late.thread.join(60)
        assert isinstance(late.error, JoinError) and "no connection" in str(late.error), repr(late.error)
        workers.wait_for_steps(0, 1)
        workers.finish()


def test_two_states_at_once() -> None:
    """What is kept for one worker that joins stays when another one asks."""
    from tfdist.exchange.channel import Channel
    from tfdist.exchange.exchange_errors import GroupFailure
    from tfdist.exchange.result_log import LoggedChannel, ResultLog

    log = ResultLog()
    channel = LoggedChannel(Channel(0, [None], GroupFailure(), "steps"), log)
    log.keep(True)
    channel.all_reduce(np.ones(2))
    log.keep(True)
    assert len(log.take()) == 1
