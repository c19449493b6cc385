import pytest
from heartbeat_watch import BOTH, Watch

from tfdist.launch.processes.heartbeat_monitor import MembershipChanges
from tfdist.launch.run_spec import run_roles


def test_training_has_begun_with_a_step_or_with_a_heartbeat_of_a_loop_without_steps():
    fit, loop, joined = Watch(), Watch(), Watch()
    assert not fit.monitor.has_begun
    fit.receive(0, alive=True, step=7)  # what it continues from
    assert not fit.monitor.has_begun
    fit.receive(0, alive=True, step=8)
    loop.receive(1, alive=True)
    joined.receive(1, membership={"lost": 0, "joined": 1, "repeated_steps": 0, "seconds_lost": 0.0})
    assert fit.monitor.has_begun and loop.monitor.has_begun and joined.monitor.has_begun


def test_silence_is_frozen():
    watch = Watch()
    watch.receive(0, alive=True)
    watch.receive(1, alive=True, step=41)
    assert not watch.pass_time(9.75, beating=[0]).frozen
    assert watch.pass_time(1, beating=[0]).frozen == {1: "no heartbeat for 10 s (last step 41)"}
    assert watch.now == 1010.0


def test_no_judgement_before_the_first_heartbeat():
    assert not Watch().pass_time(1000).frozen


def test_exiting_worker_is_not_judged():
    watch = Watch()
    watch.receive(0, alive=True)
    watch.receive(0, alive=False)
    assert not watch.pass_time(1000).frozen
    assert watch.monitor.heartbeat_ranks == {0}


def test_ended_worker_is_not_judged():
    watch = Watch()
    watch.receive(0, alive=True)
    assert not watch.pass_time(100, is_stopped={1: False}).frozen


def test_timeout_of_zero_freezes_no_worker():
    watch = Watch(heartbeat_timeout=0.0)
    watch.receive(0, alive=True)
    assert not watch.pass_time(1000, is_stopped={0: True, 1: False}).frozen
    assert not watch.monitor.suspects_freeze({0: True})


def test_time_in_which_the_launcher_was_suspended_does_not_count():
    """It was stopped, or blocked by a paused terminal: heartbeats may have been dropped."""
    watch = Watch()
    watch.receive(0, alive=True)
    watch.now += 3600
    assert not watch.check().frozen
    assert not watch.pass_time(8.75).frozen
    assert watch.pass_time(0.25).frozen


def test_stopped_process_is_reported_at_once_and_frozen_in_time():
    watch = Watch()
    watch.receive(1, alive=True, step=3)
    stopped = {0: False, 1: True}
    assert not watch.pass_time(0.25, is_stopped=stopped).frozen
    assert watch.messages == [
        "worker 1 is stopped (as by SIGSTOP): frozen unless it continues within 10 s (last step 3)"
    ]
    assert not watch.pass_time(9.5, is_stopped=stopped).frozen
    assert watch.pass_time(0.25, is_stopped=stopped).frozen == {
        1: "no heartbeat for 10 s, because it is stopped (last step 3)"
    }
    assert len(watch.messages) == 1


def test_stopped_process_without_heartbeats_is_frozen_too():
    watch = Watch()
    assert watch.pass_time(20, is_stopped={0: True, 1: False}).frozen == {0: "stopped for 10 s"}
    assert watch.now == 1010.25


def test_stopped_process_may_continue():
    watch = Watch()
    watch.receive(1, alive=True)
    watch.pass_time(9, is_stopped={0: False, 1: True})
    watch.receive(1, alive=True)
    assert not watch.pass_time(9).frozen
    assert watch.messages[1:] == ["worker 1 continues"]


def test_suspects_are_silent_or_stopped():
    watch = Watch()
    watch.receive(0, alive=True)
    watch.pass_time(1.75)
    assert not watch.monitor.suspects_freeze(BOTH)
    assert watch.monitor.suspects_freeze({0: False, 1: True})
    watch.pass_time(0.25)
    assert watch.monitor.suspects_freeze(BOTH)
    assert not watch.monitor.suspects_freeze({1: False})


def test_progress_properties():
    watch = Watch()
    assert (watch.monitor.step, watch.monitor.saved, watch.monitor.heartbeat_ranks) == (None, None, frozenset())
    watch.receive(0, step=3)
    watch.receive(1, step=5, saved=2, error={"type": "KeyError", "message": "x"})
    watch.receive(1, alive=True)
    assert (watch.monitor.step, watch.monitor.saved, watch.monitor.heartbeat_ranks) == (5, 2, {0, 1})
    assert watch.monitor.errors == {1: {"type": "KeyError", "message": "x"}}


def test_steps_and_checkpoints_are_those_of_the_newest_fit():
    watch = Watch()
    watch.receive(0, step=900, saved=9, saved_step=900)
    watch.receive(1, step=900)
    watch.receive(0, fit=2, step=0)
    known = watch.monitor
    assert (known.fit, known.step, known.saved, known.saved_step) == (2, 0, None, None)
    watch.receive(0, fit=2, step=3, saved=0, saved_step=2)
    assert (known.step, known.saved, known.saved_step) == (3, 0, 2)
    assert "(last step 3 of fit 2)" in watch.pass_time(20).frozen[0]


CHANGES = {"lost": 2, "joined": 1, "repeated_steps": 3, "seconds_lost": 0.5}


def test_most_losses_and_joins_of_any_worker():
    watch = Watch(roles=run_roles(2, is_elastic=True))
    assert watch.monitor.membership is None
    watch.receive(0, alive=True, membership=CHANGES)
    watch.receive(1, alive=True, membership={**CHANGES, "lost": 1, "seconds_lost": 0.75})
    watch.receive(1, alive=True)
    watch.monitor.reset(0)
    assert watch.monitor.membership == MembershipChanges(lost=2, joined=1, repeated_steps=3, seconds_lost=0.75)


def test_number_of_workers_that_train():
    watch = Watch(roles=run_roles(3, is_elastic=True))
    assert watch.monitor.training is None
    watch.receive(0, membership={**CHANGES, "training": 2})
    watch.receive(1, membership={**CHANGES, "lost": 1, "training": 3})  # it has not seen the last loss
    watch.receive(1, membership=CHANGES)
    assert watch.monitor.training == 2
    watch.receive(1, membership={**CHANGES, "joined": 2, "training": 3})
    assert watch.monitor.training == 3


def test_losses_and_joins_alone_are_not_a_heartbeat():
    watch = Watch()
    watch.receive(0, fit=2, step=3)
    watch.receive(0, membership=CHANGES)
    watch.receive(1, membership=CHANGES)
    assert (watch.monitor.fit, watch.monitor.step, watch.monitor.heartbeat_ranks) == (2, 3, {0})
    assert watch.pass_time(20).frozen.keys() == {0}


@pytest.mark.parametrize("wrong", [{"lost": "2"}, {"seconds_lost": -1}, {"joined": None}])
def test_wrong_losses_and_joins_are_ignored(wrong):
    watch = Watch()
    watch.receive(0, membership={**CHANGES, **wrong})
    watch.receive(0, membership=[1])
    assert watch.monitor.membership is None and not watch.monitor.trained_ranks


def test_worker_has_trained_after_a_step_of_its_process():
    watch = Watch(roles=run_roles(3, is_elastic=True))
    for rank in (0, 1):
        watch.receive(rank, step=40)  # restored, or where it waits to join
    assert not watch.monitor.trained_ranks
    watch.receive(0, step=41)
    watch.receive(2, membership=CHANGES)
    assert watch.monitor.trained_ranks == {0, 2}
    watch.monitor.reset(0)
    assert watch.monitor.trained_ranks == {2}
    assert watch.monitor.heartbeat_ranks == {0, 1}, "of the attempt"


def test_elastic_training_may_stall_while_a_worker_is_away():
    watch = Watch(roles=run_roles(2, is_elastic=True), heartbeat_timeout=0.0, stall_timeout=5.0)
    watch.receive(1, step=9, phase="validation")
    for step in (1, 2):
        watch.receive(0, step=step)
    assert watch.pass_time(6, is_stopped={0: False}).stall == "no worker made a step for 5 s (last steps: 2)"


@pytest.mark.parametrize("datagram", [b"", b"\xff", b"[1]", b"3", b"{", b"[" * 60_000])
def test_malformed_heartbeat_is_ignored(datagram):
    monitor = Watch().monitor
    monitor.receive(0, datagram, now=1000.0)
    assert not monitor.heartbeat_ranks


def test_wrong_values_are_ignored():
    watch = Watch()
    watch.receive(0, step="many", saved=1.5, phase=3, error="none", fit="2")
    watch.receive(1, step=True, phase="validation", batch="1", fit=True)
    assert watch.monitor.fit == 1
    assert (watch.monitor.step, watch.monitor.saved, watch.monitor.errors) == (None, None, {})


def test_the_newest_checkpoint_of_any_worker_counts():
    watch = Watch()
    assert (watch.monitor.saved, watch.monitor.saved_step, watch.monitor.phase) == (None, None, None)
    watch.receive(0, saved=3, saved_step=30)
    watch.receive(1, saved=4, saved_step=40, phase="validation")
    assert (watch.monitor.saved, watch.monitor.saved_step, watch.monitor.phase) == (4, 40, "validation")
    watch.receive(0, saved=5, saved_step=[50])
    watch.receive(1, step=1)
    assert (watch.monitor.saved, watch.monitor.saved_step, watch.monitor.phase) == (5, None, None)
