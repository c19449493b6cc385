"""Workers whose shares move after every step compute what one process computes, under `tfdist run`."""

from pathlib import Path

import elastic_programs
import moving_shares
import numpy as np
import pytest
import share_programs
from elastic_programs import assert_close, of
from launched_runs import launch_once
from one_process import in_one_process
from shared_workers import run_of_program

pytestmark = [pytest.mark.usefixtures("cpus"), pytest.mark.multi_process]
_SCRIPT = Path(__file__).with_name("on_workers_shares.py")


def seen_by_ranks(run):
    """The outcomes and the observations of each rank."""
    run.assert_complete()
    return [run.arrays(f"shares-{rank}.npz") for rank in range(2)], [run.json(f"seen-{rank}.json") for rank in range(2)]


@pytest.fixture(scope="module")
def workers(request):
    return seen_by_ranks(run_of_program(request, "on_workers_shares"))


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    options = {"options": ["--workers", "2"], "paths": [_SCRIPT.parents[1] / "strategies"]}
    run = launch_once(tmp_path_factory, "more moving shares", _SCRIPT, "MORE", **options)
    return seen_by_ranks(run)


def assert_equals_one_process(workers, program):
    one = elastic_programs.flat({program: in_one_process(share_programs.ALL[program])})
    for outcomes in workers[0]:
        # Sums of float32 over other rows: 1e-6 over 30 steps of one program, 2e-5 with synchronized statistics.
        assert_close(of(outcomes, program), of(one, program), 1e-6 if program == "thirty_steps" else 2e-5)


@pytest.mark.parametrize("program", ["thirty_steps", *share_programs.PROGRAMS])
def test_weights_losses_metrics_and_predictions_are_those_of_one_process(workers, program):
    assert_equals_one_process(workers, program)


@pytest.mark.long
@pytest.mark.parametrize("program", share_programs.MORE)
def test_more_programs_are_those_of_one_process(more, program):
    assert_equals_one_process(more, program)


def test_weights_are_bit_identical_on_all_workers(workers):
    first, second = workers[0]
    for name in first:
        if "/weights/" in name:
            np.testing.assert_array_equal(first[name], second[name], name)


def test_rows_move_in_every_step_and_each_is_computed_once(workers):
    for seen in workers[1]:
        rows = seen["steps"]["rows"]
        # Three devices begin with equal parts. A step is reported in the next one.
        assert [row[0] for row in rows[:6]] == [5, *(share[0] for share in moving_shares.SHARES)]
        assert all(sum(row) == 16 for row in rows)
        assert all(seconds > 0 for seconds in seen["steps"]["seconds"])


def test_gradients_wait_for_the_clock(workers):
    for seen in workers[1]:
        assert len(seen["ordered"]) > 2
        assert all(seen["ordered"])


@pytest.mark.long
def test_micro_batches_and_sharded_state_change_nothing(more):
    for outcomes in more[0]:
        assert_close(of(outcomes, "micro-batches"), of(outcomes, "accumulating"))
        assert_close(of(outcomes, "sharded state"), of(outcomes, "thirty_steps"), 1e-6)


@pytest.mark.long
def test_compressed_gradients_of_moving_rows_add_up(more):
    one = elastic_programs.flat({"compressed": in_one_process(elastic_programs.compressed)})
    for outcomes in more[0]:
        ours = of(outcomes, "compressed")
        for name in (name for name in ours if name.startswith("weights")):
            # PowerSGD's Gram matrix: see test_compression_on_workers.py.
            np.testing.assert_allclose(ours[name], of(one, "compressed")[name], rtol=1e-3, atol=1e-3)


@pytest.mark.long
def test_fixed_shares_keep_static_sizes(more):
    one = elastic_programs.flat({"static": in_one_process(share_programs.fixed_sizes)})
    for rank, (outcomes, seen) in enumerate(zip(*more, strict=True)):
        assert set(seen["static sizes"]) == ({6} if rank else {4})
        assert_close(of(outcomes, "static"), of(one, "static"))


def test_a_resumed_training_has_the_shares_and_the_bits_of_one_that_was_not_interrupted(workers):
    for outcomes in workers[0]:
        resumed, uninterrupted = of(outcomes, "resumed"), of(outcomes, "fixed")
        for name in uninterrupted:
            np.testing.assert_array_equal(resumed[name], uninterrupted[name], name)
        assert [float(resumed[f"shares/{rank}"]) for rank in range(2)] == [0.75, 0.25]


@pytest.mark.long
def test_a_training_with_moving_shares_resumes_with_the_numbers_of_one_process(more):
    for outcomes in more[0]:
        resumed, one = of(outcomes, "resumed moving"), of(outcomes, "accumulating")
        assert_close({name: resumed[name] for name in one}, one)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("function", "Received: a function that creates the data of each worker"),
        ("files", "with AutoShardPolicy.FILE"),
        ("shard", "without `shard`"),
        ("no batches", "A dataset must have batches"),
        ("shares", "Invalid `shares`. Received: shares=[1, 2, 3] with 2 workers"),
        ("limits", "max_share=0.3 with 2 workers"),
    ],
)
def test_what_cannot_be_divided_is_refused(workers, what, message):
    for seen in workers[1]:
        assert message in seen["refused"][what]
