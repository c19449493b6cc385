"""Counters: by label, of tensors whose length is known when they are traced or when they are there."""

from types import SimpleNamespace

import pytest
import tensorflow as tf

from tfdist.collectives.byte_counters import OTHER, ByteCounters, CommunicationStats
from tfdist.collectives.collective_group import CollectiveGroup
from tfdist.utils.sum_copies import SHORT_BYTES, sum_copies

pytestmark = pytest.mark.usefixtures("cpus")


def test_counts_are_kept_by_label_and_added_up():
    traffic = ByteCounters("CPU:0")
    traffic.add("int8", tf.zeros([10], tf.int32), 1.5)
    traffic.add("int8", tf.zeros([2], tf.int32), 0.5)
    traffic.add("topk", tf.zeros([5]), 3)
    traffic.add_dense("int8", [tf.zeros([100])], 1.5)
    traffic.add(OTHER, tf.zeros([7], tf.float64), 1)
    assert traffic.by_label() == {
        "int8": CommunicationStats(2, 48, 64, 600),
        "topk": CommunicationStats(1, 20, 60, 0),
    }
    count = traffic.count()
    assert (count.gradient_collectives, count.gradient_bytes, count.wire_bytes, count.dense_bytes) == (3, 68, 124, 600)
    assert (count.other_collectives, count.other_bytes) == (1, 56)
    assert count.compression_ratio == 600 / 124


def test_nothing_sent_is_a_ratio_of_one():
    assert ByteCounters("CPU:0").count() == CommunicationStats()
    assert CommunicationStats(dense_bytes=100).compression_ratio == 1.0


def test_executions_are_counted_and_not_traces():
    traffic = ByteCounters("CPU:0")

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def send(tensor):
        for _ in tf.range(2):
            traffic.add("rows", tensor, 2 / 3)
        traffic.add_dense("rows", [tensor], 2)

    for rows in (1, 4, 0):
        send(tf.zeros([rows, 3]))
    assert traffic.by_label()["rows"] == CommunicationStats(6, 2 * 12 * 5, 2 * 8 * 5, 2 * 12 * 5)


@pytest.mark.parametrize("members", [2, 3, 4])
def test_short_sums_between_workers_are_counted_as_they_are_sent(members):
    counts = {}
    sizes = (8, SHORT_BYTES // (members - 1), SHORT_BYTES // (members - 1) + 1, 10**6)
    for at_once in (False, True):
        launcher = SimpleNamespace(
            size=members, sends_short_sums_at_once=at_once, sum=lambda tensor, *_, **__: tf.identity(tensor)
        )
        traffic = ByteCounters("CPU:0")
        group = CollectiveGroup(launcher, traffic, "dense")
        summed = tf.function(group.sum, input_signature=[tf.TensorSpec([None], tf.uint8)])
        for nbytes in sizes:
            before = traffic.by_label().get("dense", CommunicationStats())
            group.sum(tf.zeros([nbytes], tf.uint8))
            summed(tf.zeros([nbytes], tf.uint8))
            traffic.add_dense_sum(
                "dense", [tf.zeros([nbytes // 2], tf.uint8), tf.zeros([-(-nbytes // 2)], tf.uint8)], group
            )
            counts[at_once, nbytes] = traffic.by_label()["dense"] - before
    for nbytes in sizes:
        for at_once in (False, True):
            copies = sum_copies(nbytes, members) if at_once else 2 * (members - 1) / members
            assert counts[at_once, nbytes].wire_bytes == pytest.approx(2 * copies * nbytes, abs=2)
            assert counts[at_once, nbytes].dense_bytes == pytest.approx(copies * nbytes, abs=1)
