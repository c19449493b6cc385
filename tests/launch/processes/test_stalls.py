"""When a training makes no progress although its workers live."""

import pytest
from heartbeat_watch import Watch


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
