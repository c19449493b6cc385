"""Which workers of an elastic attempt train, and of which losses it may have failed."""

import signal

from tfdist.launch.restart.elastic_workers import ElasticWorkers
from tfdist.launch.restart.worker_exit import WorkerExit


def started(*, workers=3, least=1):
    elastic = ElasticWorkers(range(workers), least=least)
    for rank in range(workers):
        elastic.record_start(rank, now=0.0)
    return elastic


def test_replacement_trains_from_its_first_step_on():
    elastic = started()
    assert elastic.count(now=1.0) == 3
    assert elastic.record_exit(WorkerExit(1, -9), now=1.0)
    assert elastic.count(now=1.0) == 2
    elastic.record_start(1, now=2.0)
    assert elastic.count(now=50.0) == 2 and elastic.is_waiting(1)
    elastic.observe({0, 1, 2}, (1, 8), now=50.0)
    assert elastic.count(now=50.0) == 3 and not elastic.is_waiting(1)


def test_replacement_that_reports_no_steps_trains_after_a_minute():
    elastic = started()
    elastic.record_exit(WorkerExit(1, -9), now=1.0)
    elastic.record_start(1, now=2.0)
    assert [elastic.count(now=now) for now in (61.9, 62.0)] == [2, 3]


def test_only_a_process_that_starts_while_others_train_joins_them():
    elastic = started()
    elastic.record_exit(WorkerExit(1, -9), now=1.0)
    elastic.record_start(1, now=2.0)
    elastic.observe([], (1, -1), now=3.0)
    assert elastic.observe({0, 1, 2}, (1, 0), now=50.0) == []
    elastic.record_exit(WorkerExit(2, -9), now=51.0)
    elastic.record_start(2, now=52.0)
    assert elastic.observe({0, 1}, (1, 7), now=53.0) == []
    assert elastic.observe({0, 1, 2}, (1, 8), now=54.0) == [2]
    late = ElasticWorkers([3], least=0, late=[3])
    late.record_start(3, now=0.0)
    assert late.observe({3}, (1, 8), now=9.0) == [3], "others train on other hosts"


def test_all_fail_one_after_the_other_though_the_first_are_started_again():
    elastic = started()
    exits = [WorkerExit(rank, 5) for rank in range(3)]
    assert elastic.record_exit(exits[0], now=1.0)
    elastic.record_start(0, now=2.0)
    assert elastic.record_exit(exits[1], now=3.0)
    elastic.record_start(1, now=4.0)
    assert elastic.record_exit(WorkerExit(0, 9), now=5.0), "of a process that had not joined"
    assert not elastic.record_exit(exits[2], now=6.0)
    assert elastic.recent_exits == exits
    assert not elastic.may_restart


def test_loss_after_which_the_others_made_a_step_is_not_the_cause():
    elastic = started()
    elastic.record_exit(WorkerExit(0, 5), now=10.0)
    elastic.observe({1, 2}, (1, 8), now=10.5)  # a heartbeat that was sent before
    elastic.observe({1, 2}, (1, 9), now=11.0)
    elastic.observe({1, 2}, (1, 9), now=12.0)
    assert elastic.recent_exits == [WorkerExit(0, 5)]
    elastic.observe({1, 2}, (1, 10), now=13.0)
    assert elastic.recent_exits == []
    elastic.record_exit(WorkerExit(2, 6), now=14.0)
    assert elastic.recent_exits == [WorkerExit(2, 6)]


def test_first_step_of_a_later_fit_is_progress():
    elastic = started()
    elastic.record_exit(WorkerExit(0, 5), now=10.0)
    elastic.observe({1, 2}, (1, 900), now=11.0)
    elastic.observe({1, 2}, (2, 0), now=12.0)
    assert elastic.recent_exits == []


def test_too_few_are_left():
    elastic = started(workers=2, least=2)
    assert not elastic.record_exit(WorkerExit(0, 5), now=10.0)


def test_process_that_cannot_be_started_is_not_the_cause():
    elastic = started()
    elastic.record_exit(WorkerExit(0, 5), now=10.0)
    assert elastic.record_exit(WorkerExit(0, 1, failure_reason="it could not be started"), now=11.0)
    assert elastic.recent_exits == [WorkerExit(0, 5)]


def test_worker_that_could_not_join_is_not_the_cause():
    elastic = started()
    elastic.record_exit(WorkerExit(0, -9), now=10.0)
    elastic.record_start(0, now=11.0)
    for now, step in ((11.0, 8), (12.0, 9)):
        elastic.observe({1, 2}, (1, step), now=now)
    assert elastic.record_exit(WorkerExit(0, 1, ("JoinError",)), now=13.0)
    elastic.record_exit(WorkerExit(1, 5), now=13.5)
    assert elastic.recent_exits == [WorkerExit(1, 5)]


def test_waiting_workers_are_ended_after_the_grace():
    elastic = started()
    assert elastic.signal_to_waiting(5.0, now=10.0) is None
    elastic.record_completion(now=10.0)
    elastic.record_completion(now=14.0)
    signals = [elastic.signal_to_waiting(5.0, now=now) for now in (14.9, 15.0, 19.9, 20.0)]
    assert signals == [None, signal.SIGTERM, signal.SIGTERM, signal.SIGKILL]
    assert not elastic.may_restart


def test_attempt_without_elastic_workers():
    elastic = ElasticWorkers([], least=0)
    elastic.record_start(0, now=1.0)
    elastic.observe({0}, (1, 1), now=2.0)
    assert elastic.may_restart and elastic.signal_to_waiting(5.0, now=9.0) is None


def test_workers_start_and_leave():
    elastic = ElasticWorkers(range(5), least=1, late={3, 4}, unwanted={3, 4})
    for rank in range(3):
        elastic.record_start(rank, now=0.0)
    assert elastic.resize(3, now=1.0) == ([], [])
    assert elastic.resize(4, now=1.0) == ([3], [])
    elastic.record_start(3, now=1.0)
    assert elastic.count(now=2.0) == 3 and elastic.is_waiting(3), "it has to join the others"
    elastic.observe({0, 1, 2, 3}, (1, 8), now=3.0)
    assert elastic.count(now=3.0) == 4
    assert elastic.record_exit(WorkerExit(1, -9), now=4.0)
    assert elastic.resize(2, now=4.0) == ([], [1, 3]), "the one that does not train, and the last one"
    assert [elastic.is_wanted(rank) for rank in range(4)] == [True, False, True, False]
    assert elastic.resize(4, now=4.0) == ([1, 4], []), "not the one that is still leaving"
    assert elastic.resize(5, now=4.0) == ([3], [])
    assert elastic.is_wanted(3) and elastic.wanted_count == 5
    assert [elastic.is_leaving(rank) for rank in range(5)] == [False, False, False, True, False]
    elastic.record_exit(WorkerExit(3, 75), now=5.0)
    elastic.record_start(3, now=5.0)
    assert not elastic.is_leaving(3)
