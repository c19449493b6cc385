"""Rates and latencies of a group against a simulation, message by message, of a ring and of an all-to-all."""

import argparse

import measured_networks
import pytest

from tfdist.planning.conditions import Conditions
from tfdist.planning.link_costs import Link, collective_seconds
from tfdist.planning.predict_data_parallel import DataParallel, predict_data_parallel
from tfdist.planning.topology import GroupLink, Topology, parse_topology, ring_order

NETWORKS = (
    "rack:8,10gbit,0.05ms/1gbit,0.5ms",
    "rack:8,10gbit/40gbit",
    "rack:4,1gbit,0.1ms/1gbit,0.1ms",
    "rack:8,1gbit/1mbit",
)


def ring_seconds(network: Topology, workers: int, nbytes: float) -> float:
    """The time of a ring all-reduce: each worker sends what it has received, when it has sent what came before."""
    order = ring_order(workers)
    chunk = nbytes / workers
    assert network.uplink is not None
    racks = [network.rack(worker) for worker in order]
    rates, latencies = [], []
    for place in range(workers):
        here, following = racks[place], racks[(place + 1) % workers]
        if here == following:
            rates.append(network.port.bytes_per_second)
            latencies.append(network.port.latency_seconds)
        else:  # the hops of the ring that leave a rack at the same time share its uplink
            sharing = sum(racks[i] == here != racks[(i + 1) % workers] for i in range(workers))
            rates.append(min(network.port.bytes_per_second, network.uplink.bytes_per_second / sharing))
            latencies.append(network.uplink.latency_seconds)
    arrived, sent = [0.0] * workers, [0.0] * workers
    for _ in range(2 * (workers - 1)):
        sent = [max(sent[i], arrived[i]) + chunk / rates[i] for i in range(workers)]
        arrived = [sent[i - 1] + latencies[i - 1] for i in range(workers)]
    return max(arrived)


def exchange_seconds(network: Topology, workers: int, nbytes: float) -> float:
    """The time of an all-to-all: all messages at once, each link with as many bytes as pass it."""
    slices = nbytes / workers
    assert network.uplink is not None
    busiest = (workers - 1) * slices / network.port.bytes_per_second
    for rack in {network.rack(worker) for worker in range(workers)}:
        pairs = [(a, b) for a in range(workers) for b in range(workers) if network.rack(a) == rack != network.rack(b)]
        busiest = max(busiest, len(pairs) * slices / network.uplink.bytes_per_second)
    return busiest + network.uplink.latency_seconds


@pytest.mark.parametrize("text", NETWORKS)
@pytest.mark.parametrize("workers", [9, 16, 64, 200])
@pytest.mark.parametrize("nbytes", [1e3, 1e6, 1e9])
def test_ring_is_as_slow_as_its_simulation(text: str, workers: int, nbytes: float) -> None:
    network = parse_topology(text)
    expected = ring_seconds(network, workers, nbytes)
    # A chunk passes two hops less than two rounds of the ring; the last one of all misses two fast ones, so the mean
    # hop is up to `N / (N - 1)` too fast. Latencies and the slowest link pass beside each other, but count both.
    predicted = collective_seconds("sum", nbytes, workers, network.link(workers))
    assert (1 - 1 / workers) * expected <= predicted * (1 + 1e-9) and predicted <= 2 * expected
    if nbytes == 1e9:  # where the slowest link decides
        assert predicted == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("text", NETWORKS)
@pytest.mark.parametrize("workers", [9, 16, 64, 75])
def test_all_to_all_is_as_slow_as_its_busiest_link(text: str, workers: int) -> None:
    network = parse_topology(text)
    predicted = collective_seconds("exchange", 1e7, workers, network.link(workers).of("exchange"))
    assert predicted == pytest.approx(exchange_seconds(network, workers, 1e7))


def test_exchanges_of_gradients_use_the_link_of_their_kind() -> None:
    measured = measured_networks.from_two_workers()

    def seconds(exchange: Link) -> float:
        conditions = Conditions(GroupLink(1e9, 0.0, exchange), 10**12)
        return predict_data_parallel(measured, conditions, 4, DataParallel("int8")).step_seconds

    fast = seconds(Link(1e9))
    assert seconds(Link(1e9, 1.0)) == pytest.approx(fast + 1.0, rel=0.03)  # latencies of buckets pass beside each other
    sent = 3 / 4 * 10_178_295  # in the first of the two phases
    assert seconds(Link(1e6)) == pytest.approx(fast + sent / 1e6, rel=0.01)


def test_a_rack_alone_and_a_flat_network_have_the_link_of_a_host() -> None:
    flat, rack = parse_topology("flat,10gbit,0.05ms"), parse_topology("rack:8,10gbit,0.05ms/1gbit,0.5ms")
    for link in (flat.link(4096), rack.link(8), rack.link(8).of("exchange"), flat.link(9).of("exchange")):
        assert (link.bytes_per_second, link.latency_seconds) == (flat.port.bytes_per_second, 0.05e-3)


def test_rings_of_more_than_ten_workers_cross_racks_more_often() -> None:
    """Worker 10 follows worker 1 in a ring: two of 16 hops leave each of the two racks, where one would be enough."""
    network = parse_topology("rack:8,10gbit/1gbit")
    assert network.uplink is not None
    assert network.link(9).bytes_per_second == network.uplink.bytes_per_second
    assert network.link(16).bytes_per_second == network.uplink.bytes_per_second / 2


@pytest.mark.parametrize(
    "text",
    [
        "rack:8x8",
        "rack:8x8,10gbit",
        "rack:0x8,10gbit/1gbit",
        "rack:8x0,10gbit/1gbit",
        "rack:8x8x8,10gbit/1gbit",
        "rack:8x8,10gbit/1gbit/1mbit",
        "flat",
        "flat,1gbit/1gbit",
        "ring:8,1gbit",
        "",
        "rack:-8,1gbit/1gbit",
    ],
)
def test_invalid_topology(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="Invalid topology. Received: .* Expected: flat,RATE"):
        parse_topology(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rack:8x8,10gbit/0gbit", "Invalid rate of a link. Received: '0gbit'"),
        ("rack:8x8,10/1gbit", "Invalid rate of a link. Received: '10'"),
        ("flat,1gbit,0.5", "Invalid duration. Received: '0.5'"),
        ("flat,1gbit,1ms,2ms", "Invalid link. Received: '1gbit,1ms,2ms'"),
        ("flat,1e400gbit", "Invalid rate of a link"),
    ],
)
def test_invalid_links_of_a_topology(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message.replace(".", r"\.")):
        parse_topology(text)


def test_rates_per_second_may_be_written_out() -> None:
    written_out = parse_topology("rack:8x8,10Gbit/s,1ms/1Gbit/s")
    assert written_out.link(9) == parse_topology("rack:8x8,10gbit,1ms/1gbit").link(9)
