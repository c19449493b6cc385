import dataclasses

import pytest
from planned_programs import program

from tfdist.planning.cost_terms import Conditions, on_shared_cores, step_of
from tfdist.planning.group_exchanges import exchange_of, ready_parts, wire_bytes
from tfdist.planning.link_costs import LinkSpeed
from tfdist.planning.measurements import DENSE, SUM, Collective, Measurements
from tfdist.planning.predict_data_parallel import (
    DataParallel,
    LocalTraining,
    ParameterServers,
    predict_data_parallel,
    predict_local_updates,
    predict_parameter_servers,
)
from tfdist.planning.predict_model_parallel import ModelParallel, predict_model_parallel

GIGABIT, FAST = LinkSpeed.ethernet(1e9, 1e-4), LinkSpeed(1e12)
FITS = 10**12


def on(link: LinkSpeed, **changes) -> Conditions:
    return Conditions(link, FITS, **changes)


def test_measurements_survive_json():
    measured = program()
    assert Measurements.from_json(measured.to_json()) == measured


def test_one_worker_takes_the_measured_step():
    measured = program()
    predicted = predict_data_parallel(measured, on(GIGABIT), 1, DataParallel())
    assert predicted.step_seconds == pytest.approx(measured.program.steps[1].seconds)
    assert predicted.wire_bytes == 0


def test_workers_beyond_the_cores_share_them():
    measured = program()
    cores = measured.machine.cores // measured.machine.cores_per_worker
    assert on_shared_cores(measured, cores) == measured
    shared = on_shared_cores(measured, 3 * cores)
    times = [predict_data_parallel(one, on(FAST), 2, DataParallel("int8")).step_seconds for one in (measured, shared)]
    assert times[1] == pytest.approx(3 * times[0])
    machine = dataclasses.replace(measured.machine, local_transfers=measured.machine.transfers[:1])
    by_memory = on_shared_cores(dataclasses.replace(measured, machine=machine), cores)
    assert by_memory.machine.transfers == machine.local_transfers


def test_a_step_between_measured_numbers_of_rows():
    assert step_of(program().program, 48).seconds == pytest.approx(0.03 + 48 * 0.0005)
    assert step_of(program().program, 8).seconds == pytest.approx(0.03 + 8 * 0.0005)
    only = program().program
    only = dataclasses.replace(only, steps=only.steps[1:2])
    assert step_of(only, 32).update_seconds == step_of(only, 64).update_seconds
    assert step_of(only, 32).backward_seconds == pytest.approx(step_of(only, 64).backward_seconds / 2)


@pytest.mark.parametrize("workers", [2, 3, 4, 8, 64])
def test_dense_gradients_are_sent_to_their_owners_and_sums_back(workers):
    predicted = predict_data_parallel(program(), on(GIGABIT), workers, DataParallel())
    assert predicted.wire_bytes == pytest.approx(2 * (workers - 1) / workers * 40e6)
    alone = predicted.wire_bytes / GIGABIT.bytes_per_second
    assert predicted.link_seconds == pytest.approx(alone)
    assert alone < predicted.step_seconds < alone + 0.2 + workers * 0.005


def test_two_phases_of_other_sizes_follow_from_four_members():
    measured = program().program
    four, eight = exchange_of(measured, "int8", 4), exchange_of(measured, "int8", 8)
    assert eight.compute_seconds == four.compute_seconds
    payload = sum(one.nbytes for one in exchange_of(measured, "int8", 2).collectives)
    for members, exchange in ((4, four), (8, eight)):
        assert wire_bytes(exchange.collectives, members) == pytest.approx(
            2 * (members - 1) / members * payload, rel=1e-4
        )


def test_two_phases_follow_from_two_members_if_only_these_are_known():
    measured = program().program
    two = tuple(one for one in measured.exchanges if one.members == 2)
    exchange = exchange_of(dataclasses.replace(measured, exchanges=two), "int8", 8)
    expected = exchange_of(measured, "int8", 8)
    assert wire_bytes(exchange.collectives, 8) == pytest.approx(wire_bytes(expected.collectives, 8), rel=1e-4)


def test_what_all_members_gather_is_decoded_by_each():
    measured = program().program
    exchanges = tuple(
        dataclasses.replace(one, compute_seconds=0.01 * one.members) if one.method == "topk:0.01" else one
        for one in measured.exchanges
    )
    measured = dataclasses.replace(measured, exchanges=exchanges)
    assert exchange_of(measured, "topk:0.01", 8).compute_seconds == pytest.approx(0.08)
    assert exchange_of(measured, DENSE, 8).compute_seconds == exchange_of(measured, DENSE, 4).compute_seconds
    with pytest.raises(KeyError):
        exchange_of(measured, "sign", 2)


def test_ready_parts_of_another_number_of_buckets():
    measured = program().program
    assert ready_parts(measured, 3) == [0.2, 0.8, 1.0]
    assert ready_parts(measured, 1) == [1.0]
    assert ready_parts(measured, 5) == pytest.approx([0.2, 0.5, 0.8, 0.9, 1.0])


def test_a_compressed_exchange_is_faster_on_a_slow_link_only():
    slow, fast = on(LinkSpeed.ethernet(1e8)), on(FAST)
    int8 = DataParallel("int8")
    dense = [predict_data_parallel(program(), each, 2, DataParallel()).step_seconds for each in (slow, fast)]
    coded = [predict_data_parallel(program(), each, 2, int8).step_seconds for each in (slow, fast)]
    # On the slow link the bytes decide: an eighth of the compute stays beside a quarter of them.
    assert coded[0] < 0.35 * dense[0]
    # Without a link encoding costs 20 ms more, and copying 30 MB less saves 30 ms or more, 8 of 10 bytes.
    assert coded[1] == pytest.approx(dense[1], rel=0.5)


def test_sharded_slots_send_as_many_bytes_and_hold_fewer():
    plain = predict_data_parallel(program(), on(GIGABIT), 4, DataParallel())
    sharded = predict_data_parallel(program(), on(GIGABIT), 4, DataParallel(shard_state=True))
    assert sharded.wire_bytes == pytest.approx(plain.wire_bytes, rel=1e-6)
    assert plain.memory_bytes - sharded.memory_bytes == pytest.approx(80e6 * 3 / 4)


def test_micro_batches_hold_fewer_activations():
    plain = predict_data_parallel(program(activation_bytes=10**7), on(GIGABIT), 2, DataParallel())
    parts = predict_data_parallel(program(activation_bytes=10**7), on(GIGABIT), 2, DataParallel(micro_batches=4))
    # 24 of 32 rows are not held; gradients of micro-batches are added up.
    assert plain.memory_bytes - parts.memory_bytes == pytest.approx(24 * 10**7 - 40e6)
    assert parts.step_seconds > plain.step_seconds


def test_accumulation_exchanges_once():
    link = on(LinkSpeed.ethernet(1e8))
    plain = predict_data_parallel(program(), link, 2, DataParallel())
    four = predict_data_parallel(program(), link, 2, DataParallel(accumulated=4))
    assert four.wire_bytes == plain.wire_bytes / 4
    assert four.link_seconds < four.step_seconds < plain.step_seconds / 3


def test_a_program_that_accumulates_exchanges_less_often():
    measured = program()
    accumulating = dataclasses.replace(measured, program=dataclasses.replace(measured.program, exchanges_per_step=0.25))
    link = on(LinkSpeed.ethernet(1e8))
    each, some = (predict_data_parallel(one, link, 2, DataParallel()) for one in (measured, accumulating))
    assert some.wire_bytes == each.wire_bytes / 4 and some.step_seconds < each.step_seconds / 3
    each, some = (predict_local_updates(one, link, 2, LocalTraining(20)) for one in (measured, accumulating))
    assert some.wire_bytes == pytest.approx(each.wire_bytes / 4, rel=0.05)


def test_what_is_exchanged_beside_gradients():
    measured = program()
    others = tuple(Collective(SUM, 64, 0) for _ in range(5))
    more = dataclasses.replace(measured, program=dataclasses.replace(measured.program, other_collectives=others))
    first, second = (
        predict_data_parallel(one, on(LinkSpeed(1e9, 0.01)), 2, DataParallel()) for one in (measured, more)
    )
    # Five in place of one: each waits for a message of the other worker.
    assert second.step_seconds - first.step_seconds == pytest.approx(4 * 0.0105, rel=0.05)


def test_balanced_rows_help_workers_of_different_speeds_only():
    def seconds(speeds, balanced):
        options = DataParallel(is_balanced=balanced)
        return predict_data_parallel(program(), on(FAST, speeds=speeds), 2, options).step_seconds

    assert seconds((1.0, 1.0), True) == seconds((1.0, 1.0), False)
    assert seconds((1.0, 0.5), True) < seconds((1.0, 0.5), False)


def test_memory_is_that_of_the_worker_with_most_rows():
    def memory(measured, balanced):
        return predict_data_parallel(
            measured, on(FAST, speeds=(1.0, 0.5)), 2, DataParallel(is_balanced=balanced)
        ).memory_bytes

    measured = program(rows=96)
    # The fastest worker has two thirds of balanced rows: as many as each of two workers has of 4/3 as many rows.
    more = dataclasses.replace(measured, program=dataclasses.replace(measured.program, rows=128))
    assert memory(measured, balanced=True) == pytest.approx(memory(more, balanced=False))


def test_workers_with_several_cores_encode_beside_backpropagation():
    int8 = DataParallel("int8")
    one, four = (predict_data_parallel(program(), on(GIGABIT, cores=cores), 2, int8).step_seconds for cores in (1, 4))
    assert four < one


def test_local_updates_send_a_part_and_hold_anchors():
    link, fifty = on(LinkSpeed.ethernet(1e8)), LocalTraining(50)
    dense = predict_data_parallel(program(), link, 2, DataParallel())
    local = predict_local_updates(program(samples=64 * 100), link, 2, fifty)
    assert local.wire_bytes == pytest.approx(dense.wire_bytes / 50)
    assert local.memory_bytes == pytest.approx(dense.memory_bytes + 40e6)
    outer = predict_local_updates(program(), link, 2, dataclasses.replace(fifty, has_outer_optimizer=True))
    assert outer.memory_bytes == pytest.approx(local.memory_bytes + 40e6)


def test_exchanges_that_overlap_cost_only_the_cores():
    link = on(LinkSpeed.ethernet(1e8))
    waits = LocalTraining(100, True)
    overlaps = LocalTraining(100, True, fragments=4, overlap_steps=25)
    endless = program(samples=None)
    first, second = (predict_local_updates(endless, link, 2, options) for options in (waits, overlaps))
    # The link is busy for 3.4 s, 100 steps of 46 ms take 4.6 s.
    assert second.step_seconds < first.step_seconds - 0.025
    assert second.step_seconds == pytest.approx(second.compute_seconds + second.exchange_seconds, rel=0.05)


def test_servers_send_what_all_workers_pull():
    one = predict_parameter_servers(program(), on(GIGABIT), 8, ParameterServers(1))
    eight = predict_parameter_servers(program(), on(GIGABIT), 8, ParameterServers(8))
    assert one.link_seconds == pytest.approx(8 * eight.link_seconds)
    assert eight.link_seconds == pytest.approx(80e6 / GIGABIT.bytes_per_second)
    assert one.wire_bytes == 40e6


def test_asynchronous_workers_do_not_wait_for_each_other():
    both = [
        predict_parameter_servers(program(), on(FAST), 4, ParameterServers(4, asynchronous)).step_seconds
        for asynchronous in (False, True)
    ]
    assert both[1] < both[0]


def test_stages_hold_parts_and_send_activations():
    whole = predict_data_parallel(program(), on(GIGABIT), 1, DataParallel())
    stages = predict_model_parallel(program(), on(GIGABIT), ModelParallel(stages=4, micro_batches=8))
    # A middle stage receives and sends the activations of all rows, and their gradients.
    assert stages.wire_bytes == pytest.approx(2 * 64 * 4096)
    assert stages.memory_bytes < whole.memory_bytes - 0.7 * 160e6
    columns = predict_model_parallel(program(), on(GIGABIT), ModelParallel(stages=4, columns=2, micro_batches=4))
    assert columns.wire_bytes == pytest.approx(2 * 32 * 4096 + 10e6)


def test_split_layers_hold_parts_and_send_sums():
    split = predict_model_parallel(program(), on(GIGABIT), ModelParallel(ways=2, micro_batches=1))
    assert split.wire_bytes == pytest.approx(8 * 4 * 64 * 4096)  # 8 layers, two sums in each direction
    assert split.memory_bytes < predict_data_parallel(program(), on(GIGABIT), 1, DataParallel()).memory_bytes
