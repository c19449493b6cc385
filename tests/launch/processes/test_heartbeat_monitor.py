import json

import pytest

from tfdist.launch.process_roles import worker_roles
from tfdist.launch.processes.heartbeat_monitor import HeartbeatMonitor

BOTH = {0: False, 1: False}


class Watch:
    """A monitor of two workers, checked every quarter of a second of a simulated clock."""

    def __init__(self, heartbeat_timeout=10.0, stall_timeout=60.0):
        self.now = 1000.0
        self.monitor = HeartbeatMonitor(
            worker_roles(2),
            now=self.now,
            heartbeat_timeout_seconds=heartbeat_timeout,
            stall_timeout_seconds=stall_timeout,
        )
        self.messages = []

    def receive(self, rank, **said):
        self.monitor.receive(rank, json.dumps(said).encode(), now=self.now)

    def check(self, is_stopped=BOTH):
        report = self.monitor.check(is_stopped, now=self.now)
        self.messages += report.messages
        return report

    def pass_time(self, seconds, beating=(), is_stopped=BOTH, **said):
        """Looks on; returns the first report that ends something, or the last."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            for rank in beating:
                self.receive(rank, alive=True, **said)
            report = self.check(is_stopped)
            if report.frozen or report.stall:
                break
        return report


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


def train(watch, seconds_a_step, steps=3):
    for step in range(1, steps + 1):
        for rank in (0, 1):
            watch.receive(rank, alive=True, step=step)
        if step < steps:
            watch.pass_time(seconds_a_step, beating=[0, 1], step=step)
    return steps


@pytest.mark.parametrize(("seconds_a_step", "limit"), [(1.0, 60), (8.0, 80)])
def test_stall_adapts_to_the_steps_seen(seconds_a_step, limit):
    watch = Watch()
    step = train(watch, seconds_a_step)
    began = watch.now
    assert not watch.pass_time(limit - 0.25, beating=[0, 1], step=step).stall
    stall = watch.pass_time(0.25, beating=[0, 1], step=step).stall
    assert stall == f"no worker made a step for {limit} s (last steps: 3, 3)"
    assert watch.now == began + limit


def test_no_stall_before_two_steps():
    watch = Watch()
    step = train(watch, 1.0, steps=1)
    assert not watch.pass_time(10_000, beating=[0, 1], step=step).stall


def test_steps_of_one_worker_prevent_a_stall():
    watch = Watch()
    step = train(watch, 1.0)
    for more in range(1, 10):
        watch.receive(0, alive=True, step=step + more)
        assert not watch.pass_time(50, beating=[1], step=step).stall


def test_checkpoint_is_no_stall():
    watch = Watch()
    step = train(watch, 1.0)
    watch.pass_time(59, beating=[0, 1], step=step)
    watch.receive(0, alive=True, step=step, saved=1)
    assert not watch.pass_time(59, beating=[0, 1], step=step, saved=1).stall


def test_phase_is_no_stall_and_no_interval():
    watch = Watch()
    step = train(watch, 1.0)
    assert not watch.pass_time(1000, beating=[0, 1], step=step, phase="validation").stall
    step = train(watch, 1.0, steps=step + 2)
    assert watch.pass_time(61, beating=[0, 1], step=step).stall.startswith("no worker made a step for 60 s")


def validate(watch, step, seconds_a_batch, batches=3):
    for batch in range(batches + 1):
        for rank in (0, 1):
            watch.receive(rank, alive=True, step=step, phase="validation", batch=batch)
        if batch < batches:
            watch.pass_time(seconds_a_batch, beating=[0, 1], step=step, phase="validation", batch=batch)
    return {"step": step, "phase": "validation", "batch": batches}


@pytest.mark.parametrize(("seconds_a_batch", "limit"), [(1.0, 60), (8.0, 80)])
def test_batches_of_validation_are_judged_as_steps_are(seconds_a_batch, limit):
    watch = Watch()
    said = validate(watch, train(watch, 1.0), seconds_a_batch)
    assert not watch.pass_time(limit - 0.25, beating=[0, 1], **said).stall
    stall = watch.pass_time(0.25, beating=[0, 1], **said).stall
    assert stall == f"no worker finished a batch of validation for {limit} s (last steps: 3, 3)"


def test_validation_is_judged_from_its_beginning():
    watch = Watch()
    said = validate(watch, train(watch, 1.0), 1.0, batches=0)
    assert not watch.pass_time(59.75, beating=[0, 1], **said).stall
    assert watch.pass_time(0.25, beating=[0, 1], **said).stall


def test_long_validation_is_no_stall():
    watch = Watch()
    step = train(watch, 1.0)
    said = validate(watch, step, 50.0, batches=40)
    assert not watch.pass_time(300, beating=[0, 1], **said).stall
    assert train(watch, 1.0, steps=step + 2)
    assert not watch.pass_time(300, beating=[0, 1], step=step + 2).stall, "it adapts to batches, too"


def test_a_later_fit_is_judged_by_its_own_steps():
    watch = Watch()
    step = train(watch, 1.0)
    watch.pass_time(1, beating=[0, 1], step=step, phase="finished")
    assert not watch.pass_time(300, beating=[0, 1], fit=2, step=0).stall, "its first step is traced"
    for step in (1, 2):
        watch.pass_time(1, beating=[0, 1], fit=2, step=step)
    assert (watch.monitor.fit, watch.monitor.step) == (2, 2)
    stall = watch.pass_time(10_000, beating=[0, 1], fit=2, step=2).stall
    assert stall == "no worker made a step for 3000 s (last steps: 2, 2 of fit 2)"


def test_time_between_two_fits_is_no_interval():
    watch = Watch()
    step = train(watch, 1.0)
    for fit in (2, 3):
        watch.pass_time(50, beating=[0, 1], fit=fit - 1, step=step)
        for step in range(3):
            watch.pass_time(1, beating=[0, 1], fit=fit, step=step)
    assert watch.pass_time(10_000, beating=[0, 1], fit=3, step=2).stall.startswith("no worker made a step for 60 s")


@pytest.mark.parametrize("running", [{0: False}, {}])
def test_no_stall_after_a_worker_has_ended(running):
    watch = Watch()
    step = train(watch, 1.0)
    assert not watch.pass_time(1000, beating=running, is_stopped=running, step=step).stall


def test_no_stall_while_a_worker_exits():
    watch = Watch()
    step = train(watch, 1.0)
    watch.receive(0, alive=False, step=step)
    assert not watch.pass_time(1000, beating=[1], step=step).stall


def test_stall_timeout_of_zero():
    watch = Watch(stall_timeout=0.0)
    step = train(watch, 1.0)
    assert not watch.pass_time(10_000, beating=[0, 1], step=step).stall


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
