"""The variable with the shares: bounds of rows, reports of replicas, and what a checkpoint restores."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.load_balancing import row_shares
from tfdist.load_balancing.row_shares import RowShares
from tfdist.load_balancing.share_planning import LoadBalancing

pytestmark = pytest.mark.usefixtures("cpus")
DEVICES = (1, 2)


def shares_of(rank=1, shares=None, options=None, devices=DEVICES):
    return RowShares(devices, rank, "CPU:0", shares, options)


@pytest.mark.parametrize("rows", [16, 5, 2, 1, 0])
@pytest.mark.parametrize("shares", [None, [3, 1], [0.3, 0.7]])
def test_all_replicas_together_have_each_row_once(rows, shares):
    static = [shares_of(rank, shares).bounds(rows) for rank in range(2)]
    measured = [shares_of(rank, shares, LoadBalancing()).bounds(rows) for rank in range(2)]
    in_graph = [tf.function(shares_of(rank, shares).bounds)(tf.constant(rows)) for rank in range(2)]
    flat = [bound for worker in static for bound in worker]
    assert all(isinstance(end, int) for bounds in flat for end in bounds)
    assert flat[0][0] == 0
    assert flat[-1][1] == rows
    assert [end for _, end in flat[:-1]] == [first for first, _ in flat[1:]]
    for other in (measured, in_graph):
        assert [(int(first), int(end)) for worker in other for first, end in worker] == flat


def test_devices_of_a_worker_share_its_rows_equally():
    assert shares_of(1, [1, 3]).bounds(16) == [(4, 10), (10, 16)]


def test_the_first_shares_keep_the_limits():
    def first(worker, **arguments):
        return pytest.approx(shares_of(devices=(1, 1), **arguments).stats()[worker].share, abs=1e-6)

    limited = LoadBalancing(max_share=(0.25, 1.0))
    assert first(0, options=limited) == 0.25
    assert first(0, options=limited, shares=[1, 9]) == 0.1
    assert first(1, options=LoadBalancing(max_share=0.5), shares=[1, 9]) == 0.5


def step(shares, seconds, rows):
    """All replicas report a step of 10 seconds; those of a worker with two devices have different times."""
    reports = [
        shares.report(number, tf.constant([time, float(count), 10.0]), count)
        for number, (time, count) in enumerate(zip(seconds, rows, strict=True))
    ]
    total = tf.add_n(reports)
    shares.add_step(total)
    return total


def test_reports_of_all_replicas_add_up():
    shares = shares_of()
    total = step(shares, [0.4, 0.1, 0.2], [4, 6, 6])
    np.testing.assert_allclose(total, [0.4, 4, 10, 0.1, 6, 10, 0.2, 6, 10, 16], rtol=1e-6)
    assert shares.report(0, None, 4).numpy().tolist() == [4]  # in `evaluate`
    first, second = shares.stats()
    assert (first.steps, first.samples, second.samples) == (1, 4, 12)
    np.testing.assert_allclose([first.seconds, second.seconds], [0.4, 0.2], rtol=1e-6)  # of the slowest device
    np.testing.assert_allclose([first.waited_seconds, second.waited_seconds], [0.0, 0.2], atol=1e-6)
    assert shares.stats()[0].share == pytest.approx(1 / 3)


def elastic(rank, process=1):
    return RowShares((1, 1, 1), rank, "CPU:0", None, LoadBalancing(every_steps=1, smoothing=0.0), process=process)


def elastic_step(shares, rows, seconds):
    """All workers but the last one make a step, whose reports the last one may only repeat."""
    reports = [
        one.report(rank, tf.constant([time, float(count), 10.0]), count)
        for rank, (one, time, count) in enumerate(zip(shares, seconds, rows, strict=False))
    ]
    total = tf.add_n(reports)
    for one in shares:
        one.add_step(total)


def test_who_repeats_steps_follows_the_shares_of_the_others_through_losses():
    """Worker 1 is lost, and worker 2 joins; the one that repeats sees only what they report."""
    trained, late = [elastic(0), elastic(1)], elastic(2, process=3)
    for one in trained:
        one.give_rows_to([0, 1])
    late.take_no_rows()
    late.state.assign(trained[0].state)
    for seconds in (0.1, 0.4), (0.1, 0.4), (0.1, 0.4):
        elastic_step([*trained, late], [30, 30], seconds)
    assert trained[0].stats()[0].share > 0.75
    trained[0].give_rows_to([0])
    assert not np.array_equal(trained[0].state, late.state)
    elastic_step([trained[0], late], [60], [0.2])
    np.testing.assert_array_equal(trained[0].state, late.state)
    assert [int(end) for _, end in late.bounds(60)] == [60]  # behind those of worker 0: none
    assert late.bounds(60)[0][0] == 60
    for one in (trained[0], late):
        one.give_rows_to([0, 2 + 2 * 3])
    np.testing.assert_array_equal(trained[0].state, late.state)
    assert [int(end) for one in (trained[0], late) for _, end in one.bounds(60)] == [30, 60]


@pytest.mark.parametrize("devices", [(1, 1, 1), (2, 2, 2)])
def test_workers_that_may_be_lost_are_timed_only_for_their_shares(devices, monkeypatch):
    """Without, only who computes is exchanged, and Python is called only when that changes."""
    assert elastic(0).timers
    assert RowShares(devices, 0, "CPU:0", [1, 2, 3], None, process=1).timers
    plain = [RowShares(devices, rank, "CPU:0", None, None, process=process) for rank, process in enumerate((1, 1, 3))]
    assert not any(one.timers for one in plain)
    *trained, late = plain
    for one in trained:
        one.give_rows_to([0, 1])
    late.take_no_rows()
    late.state.assign(trained[0].state)
    calls, among = [], row_shares.planning.among
    monkeypatch.setattr(row_shares.planning, "among", lambda *arguments: calls.append(1) or among(*arguments))

    def make_step(*workers):
        replicas = [(one, rank * devices[0] + device) for rank, one in workers for device in range(devices[0])]
        total = tf.add_n([one.report(replica, None, 2) for one, replica in replicas])
        assert total[-1] == 2 * len(replicas)
        for _, one in {(0, late), *workers}:
            one.add_step(total)
        return [int(end) for _, end in late.bounds(60)][-1]

    for _ in range(2):
        assert make_step((0, trained[0]), (1, trained[1])) == 60
    assert not calls
    trained[0].give_rows_to([0])
    calls.clear()
    assert late.state.numpy()[row_shares.planning.SHARE].tolist() == [devices[0]] * 2 + [0]
    make_step((0, trained[0]))
    assert len(calls) == 1, "on the one that repeats the step"
    np.testing.assert_array_equal(trained[0].state, late.state)
    assert late.state.numpy()[row_shares.planning.SHARE].tolist() == [devices[0], 0, 0]


def moved():
    shares = shares_of(options=LoadBalancing(every_steps=1, smoothing=0.0))
    for _ in range(3):
        step(shares, [0.1, 0.4, 0.4], [8, 4, 4])
    assert shares.stats()[0].share > 0.75
    return shares


def test_a_checkpoint_restores_shares_and_measurements():
    shares, restored = moved(), shares_of(options=LoadBalancing())
    restored.restore(shares.saved())
    assert restored.stats() == shares.stats()
    assert [int(end) for _, end in restored.bounds(64)] == [int(end) for _, end in shares.bounds(64)]


def test_a_checkpoint_of_an_earlier_version_restores_what_it_has():
    saved = moved().saved()
    restored = shares_of(options=LoadBalancing())
    restored.restore({**saved, "state": saved["state"][:11]})
    assert restored.stats() == moved().stats()


def test_shares_of_workers_of_which_some_were_lost_are_not_restored():
    one = elastic(0)
    one.give_rows_to([0, 2])
    for restored in (elastic(0), RowShares((1, 1, 1), 0, "CPU:0", None, LoadBalancing())):
        before = restored.state.numpy()
        restored.restore(one.saved())
        np.testing.assert_array_equal(restored.state, before)


def test_the_first_steps_after_a_restore_are_not_measured():
    """They compile and allocate, as those of a new training do."""
    shares = moved()
    for _ in range(2):  # which are ignored, as rows have moved
        step(shares, [0.2, 0.2, 0.2], [12, 2, 2])
    restored = shares_of(options=LoadBalancing(every_steps=1, smoothing=0.0))
    restored.restore(shares.saved())
    before = restored.stats()[0].share
    for _ in range(2):
        step(restored, [9.0, 0.1, 0.1], [12, 2, 2])
    assert restored.stats()[0].share == before
    step(restored, [9.0, 0.1, 0.1], [12, 2, 2])
    assert restored.stats()[0].share < before


@pytest.mark.parametrize(
    "other",
    [
        lambda: shares_of(shares=[1, 1]),
        lambda: shares_of(options=LoadBalancing(), devices=(1, 2, 1)),
        lambda: shares_of(options=LoadBalancing(), devices=(1, 1), rank=0),
    ],
)
def test_fixed_shares_and_other_workers_restore_nothing(other):
    restored = other()
    before = restored.stats()
    restored.restore(moved().saved())
    restored.restore(None)  # a checkpoint without shares
    assert restored.stats() == before
