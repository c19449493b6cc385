"""The plan of shares from measured times: exact divisions, bounds, and simulated workers that change their speeds."""

import numpy as np
import pytest

from tfdist.load_balancing.share_planning import (
    HOLD,
    ROWS,
    SECONDS,
    SECONDS_PER_ROW,
    SHARE,
    STEPS,
    WAITED_SECONDS,
    LoadBalancing,
    after_step,
    among,
    checked_shares,
    initial_state,
    load_balancing_of,
    plan_rows,
    row_bounds,
)


class Workers:
    """Workers that compute rows at given speeds, with a part of a step that does not depend on the rows."""

    def __init__(self, speeds, batch=64, options=None, devices=None, noise=0.1, overhead=0.003):
        self.speeds, self.batch, self.options = list(speeds), batch, options or LoadBalancing()
        self.devices = devices or [1] * len(self.speeds)
        self.random, self.noise, self.overhead = np.random.default_rng(0), noise, overhead
        self.state, self.moves = initial_state(self.devices), 0
        self.clock = lambda seconds: seconds

    def run(self, steps):
        """The mean of the steps' durations, each that of the slowest worker."""
        durations = []
        for _ in range(steps):
            rows = np.diff(row_bounds(self.state[SHARE].astype(int), self.batch)).astype(float)
            noise = self.random.uniform(1 - self.noise, 1 + self.noise, len(rows))
            seconds = np.where(rows > 0, (self.overhead + 0.001 * rows) / np.asarray(self.speeds) * noise, 0.0)
            before = self.state[SHARE].tolist()
            durations.append(seconds.max() + 0.002 * self.random.uniform(1 - self.noise, 1 + self.noise))
            measured = self.clock(seconds)
            self.state = after_step(self.state, measured, rows, durations[-1], self.devices, self.options)
            self.moves += before != self.state[SHARE].tolist()
        return float(np.mean(durations))

    @property
    def shares(self):
        return (self.state[SHARE] / self.state[SHARE].sum()).tolist()


def test_rows_follow_the_speeds():
    workers = Workers([1.0, 0.5])
    even = workers.run(20)
    workers.run(100)
    assert workers.run(100) < 0.72 * even  # ideal: 2/3, and 4 % because the fixed part does not move
    assert workers.shares[0] == pytest.approx(2 / 3, abs=0.05)


def test_three_workers_of_which_one_is_slow():
    workers = Workers([0.8, 0.8, 0.2], batch=96)
    even = workers.run(20)
    workers.run(200)
    assert workers.run(100) < 0.4 * even


def test_noise_moves_nothing_between_equal_workers():
    workers = Workers([1.0] * 4)
    workers.run(2000)
    assert workers.moves == 0


def test_a_slow_phase_that_passes_is_followed_back():
    workers = Workers([1.0, 0.02])
    workers.run(400)
    assert workers.shares[1] < 0.1
    workers.speeds[1] = 1.0
    workers.run(300)
    assert workers.shares[1] == pytest.approx(0.5, abs=0.04)


def test_a_worker_whose_first_share_is_no_row_gets_some_and_is_measured():
    workers = Workers([1.0, 1.0])
    workers.state = initial_state([1, 1000])
    workers.run(300)
    assert workers.shares[0] == pytest.approx(0.5, abs=0.04)


def test_a_worker_without_a_measurement_counts_as_the_slowest_one():
    workers = Workers([1.0, 1.0], options=LoadBalancing(every_steps=1), noise=0.0)
    workers.state = initial_state([1, 1000])
    workers.run(3)  # of which two are ignored
    assert workers.state[SHARE].tolist() == [32, 32]


def test_earlier_measurements_have_the_weight_of_the_smoothing():
    options, rows = LoadBalancing(every_steps=1, smoothing=0.75), np.array([10.0, 10.0])
    state = initial_state([1, 1])
    for seconds in ([9.0, 9.0], [9.0, 9.0], [0.1, 0.1], [0.2, 0.1]):  # the first two are ignored
        state = after_step(state, np.array(seconds), rows, 10.0, [1, 1], options)
    np.testing.assert_allclose(state[SECONDS_PER_ROW], [0.75 * 0.01 + 0.25 * 0.02, 0.01], rtol=1e-12)


def test_a_single_stall_moves_nothing():
    workers = Workers([1.0, 1.0], noise=0.0)
    workers.run(50)
    for _ in range(3):
        rows = np.array([32.0, 32.0])
        workers.state = after_step(workers.state, np.array([0.035, 0.045]), rows, 0.05, [1, 1], workers.options)
        workers.state = after_step(workers.state, np.array([0.035, 30.0]), rows, 30.1, [1, 1], workers.options)
        workers.run(40)
    assert max(workers.shares) < 0.6


def test_fixed_shares_are_measured_and_stay():
    state = initial_state([1, 3])
    for _ in range(100):
        state = after_step(state, np.array([0.4, 0.1]), np.array([2.0, 6.0]), 0.5, [1, 1], None)
    assert state[SHARE].tolist() == [1, 3]
    assert (state[STEPS, 0], state[SECONDS, 0].round(6)) == (100, 40.0)
    np.testing.assert_allclose(state[WAITED_SECONDS], [0.0, 30.0], rtol=1e-9)


@pytest.mark.parametrize(
    ("seconds", "rows", "interval"),
    [([0.0, 0.0], [4.0, 4.0], 0.1), ([0.0, 0.0], [0.0, 0.0], 0.1), ([0.2, 0.1], [4.0, 4.0], 0.19)],
    ids=["not measured", "no rows", "longer than the step"],
)
def test_a_step_without_possible_times_counts_nothing(seconds, rows, interval):
    state = initial_state([1, 1])
    changed = after_step(state, np.array(seconds), np.array(rows), interval, [1, 1], LoadBalancing())
    np.testing.assert_array_equal(changed, state)


@pytest.mark.parametrize("speeds", [[1.0, 1.0], [1.0, 0.5], [0.8, 0.8, 0.2]])
def test_a_clock_that_measures_nothing_does_not_drive_the_shares_away(speeds, monkeypatch):
    def stopped(seconds):  # of the first worker: the more rows it has, the faster it seems
        return np.array([0.0006, *seconds[1:]])

    workers = Workers(speeds)
    workers.run(100)
    before, works = workers.run(100), workers.clock
    workers.clock = stopped
    # Shares are tried for a window of 22 steps, at most 6 times in 1000 steps, as rows stay for 1, 2, 4, ... windows.
    assert workers.run(1000) < 1.25 * before
    workers.clock = works
    workers.run(2000)
    np.testing.assert_allclose(workers.shares, np.array(speeds) / sum(speeds), atol=0.05)
    monkeypatch.setattr("tfdist.load_balancing.share_planning._checked_by_intervals", lambda state: True)
    workers.clock = stopped
    workers.run(200)
    assert workers.run(200) > 1.3 * before, "this is what the intervals prevent"


def test_pauses_between_steps_refute_no_shares():
    """A validation as long as ten steps after every 50 of them."""
    workers = Workers([1.0, 0.5])
    for _ in range(40):
        workers.run(49)
        workers.overhead += 0.3
        workers.run(1)
        workers.overhead -= 0.3
    assert workers.state[HOLD].tolist() == [0.0, 0.0]
    assert workers.shares[0] == pytest.approx(2 / 3, abs=0.05)


def test_shares_follow_a_worker_that_becomes_slow_as_they_move():
    """The new shares are refuted, since steps became longer; then the old ones are."""
    workers = Workers([1.0, 0.5])
    workers.run(22)
    workers.speeds = [0.3, 0.5]
    workers.run(300)
    assert workers.shares[0] == pytest.approx(3 / 8, abs=0.05)


def test_each_row_is_given_once_within_the_bounds():
    random = np.random.default_rng(0)
    for _ in range(3000):
        workers = int(random.integers(1, 7))
        devices = random.integers(1, 4, workers).tolist()
        batch = int(random.integers(1, 700))
        limits = random.uniform(0.2, 1.0, workers).tolist()
        rows = plan_rows(batch, (10 ** random.uniform(-4, 0, workers)).tolist(), devices, limits)
        if rows is None:
            assert batch < 8 * sum(devices)
            continue
        assert sum(rows) == batch
        assert all(number >= device for number, device in zip(rows, devices, strict=True))
        unit = max(1, batch // 64)
        room = sum(int(limit * batch) // unit * unit for limit in limits)
        if room >= batch + unit * workers:  # else the limits cannot be kept in whole units
            assert all(number <= limit * batch + unit for number, limit in zip(rows, limits, strict=True))


def test_bounds_divide_batches_of_any_size():
    for shares in ([1, 3], [7, 1, 1], [333333, 1000000]):
        for rows in range(40):
            bounds = row_bounds(shares, rows)
            assert bounds[0] == 0
            assert bounds[-1] == rows
            assert bounds == sorted(bounds)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: LoadBalancing(every_steps=0), "every_steps"),
        (lambda: LoadBalancing(smoothing=1.0), "smoothing"),
        (lambda: LoadBalancing(max_share=0), "max_share"),
        (lambda: LoadBalancing(max_share=()), "max_share"),
        (lambda: LoadBalancing(max_share=(0.5, 0.4)).limits(2), "largest shares do not fit"),
        (lambda: LoadBalancing(max_share=(0.5, 0.6)).limits(3), "largest shares do not fit"),
        (lambda: load_balancing_of("yes"), "load_balancing"),
        (lambda: checked_shares([1, 0], 2), "Invalid `shares`"),
        (lambda: checked_shares("13", 2), "Invalid `shares`"),
        (lambda: checked_shares([1], 2), "with 2 workers"),
    ],
)
def test_wrong_arguments_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()


class ElasticWorkers(Workers):
    """Workers of which some are lost and join."""

    def change(self, *processes):
        """Other processes compute than before, by rank; 0 stands for none."""
        self.state = among(self.state, np.array(processes), self.devices, self.options)


def measured(**options):
    """Three workers of which the second has half the speed, after some divisions."""
    workers = ElasticWorkers([1.0, 0.5, 1.0], options=LoadBalancing(**options))
    workers.change(1, 1, 1)
    workers.run(60)
    assert workers.shares == pytest.approx([0.4, 0.2, 0.4], abs=0.05)
    return workers


def test_those_that_are_left_keep_their_proportions_and_a_joiner_has_the_mean():
    workers = measured()
    before = workers.state[SHARE]
    workers.change(0, 1, 1)
    assert workers.state[SHARE].tolist() == [0, *before[1:]]
    assert workers.state[SECONDS_PER_ROW, 0] == 0
    workers.change(2, 1, 1)
    assert workers.shares[0] == pytest.approx(1 / 3)
    assert workers.shares[1] / workers.shares[2] == pytest.approx(before[1] / before[2])


def test_a_lost_worker_gets_no_rows_and_does_not_wait_in_later_steps():
    workers = measured()
    waited = workers.state[WAITED_SECONDS, 0]
    workers.change(0, 1, 1)
    workers.run(100)
    assert workers.shares[0] == 0 and workers.shares[1] == pytest.approx(1 / 3, abs=0.05)
    assert workers.state[WAITED_SECONDS, 0] == waited


def test_the_speed_of_a_joiner_is_measured():
    workers = measured()
    workers.change(0, 1, 1)
    workers.speeds[0] = 0.25
    workers.change(2, 1, 1)
    workers.run(100)
    assert workers.shares == pytest.approx([1 / 7, 2 / 7, 4 / 7], abs=0.05)


@pytest.mark.parametrize("options", [{}, {"max_share": 0.45}, {"max_share": (0.5, 0.3, 1.0)}])
def test_changes_without_a_step_between_them_are_as_one(options):
    one, two = measured(**options), measured(**options)
    one.change(0, 1, 1)
    one.change(0, 1, 0)
    one.change(2, 1, 4)
    two.change(2, 1, 4)
    np.testing.assert_array_equal(one.state, two.state)
    before = one.state.copy()
    one.change(2, 1, 4)
    np.testing.assert_array_equal(one.state, before)


def test_shares_keep_their_limits_as_far_as_the_workers_that_are_left_can():
    workers = measured(max_share=(0.45, 1.0, 0.45))
    workers.change(1, 1, 0)
    assert workers.shares == pytest.approx([0.45, 0.55, 0.0], abs=1e-5)
    workers.change(1, 0, 0)
    assert workers.shares == [1, 0, 0]
    workers = measured(max_share=0.45)
    workers.change(1, 0, 3)
    assert workers.shares == pytest.approx([0.5, 0, 0.5])
    workers.run(60)
    assert sum(workers.shares) == 1


def test_shares_that_are_refuted_do_not_return_after_a_loss():
    workers = measured()
    before = workers.shares
    workers.clock = lambda seconds: seconds * np.array([0.25, 1.0, 1.0])  # worker 0 claims to be faster than it is
    for _ in range(200):
        workers.run(1)
        if workers.state[HOLD, 0] > 0:
            break
    assert workers.state[HOLD, 0] > 0 and workers.shares == before
    workers.change(1, 1, 0)
    assert workers.shares[0] / workers.shares[1] == pytest.approx(before[0] / before[1])


def test_fixed_shares_are_those_of_the_workers_that_are_left():
    state = among(initial_state([1, 2, 3]), np.array([1, 1, 1]), [1, 2, 3], None)
    state = after_step(state, np.array([0.1, 0.2, 0.3]), np.array([1.0, 2.0, 3.0]), 0.0, [1, 1, 1], None)
    state = among(state, np.array([1, 0, 1]), [1, 2, 3], None)
    assert state[SHARE].tolist() == [1, 0, 3] and state[ROWS].tolist() == [1, 2, 3]
