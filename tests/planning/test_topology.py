"""Rates and latencies of a group against a simulation, message by message."""

import argparse

import pytest

from tfdist.planning.link_costs import collective_seconds
from tfdist.planning.topology import Topology, parse_topology

NETWORKS = (
    "rack:8,10gbit,0.05ms/1gbit,0.5ms",
    "rack:8,10gbit/40gbit",
    "rack:4,1gbit,0.1ms/1gbit,0.1ms",
    "rack:8,1gbit/1mbit",
)


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
@pytest.mark.parametrize("workers", [9, 16, 64, 75])
def test_all_to_all_is_as_slow_as_its_busiest_link(text: str, workers: int) -> None:
    network = parse_topology(text)
    predicted = collective_seconds("exchange", 1e7, workers, network.link(workers))
    assert predicted == pytest.approx(exchange_seconds(network, workers, 1e7))


def test_a_sum_is_two_rounds_of_messages_to_all() -> None:
    network = parse_topology(NETWORKS[0])
    one = collective_seconds("exchange", 1e7, 16, network.link(16))
    assert collective_seconds("sum", 1e7, 16, network.link(16)) == pytest.approx(2 * one)


def test_a_rack_alone_and_a_flat_network_have_the_link_of_a_host() -> None:
    flat, rack = parse_topology("flat,10gbit,0.05ms"), parse_topology("rack:8,10gbit,0.05ms/1gbit,0.5ms")
    for link in (flat.link(4096), rack.link(8)):
        assert (link.bytes_per_second, link.latency_seconds) == (flat.port.bytes_per_second, 0.05e-3)


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
        "flat,1gbit,",
        "flat, 1gbit, 1ms",
        "rack:8,10gbit,/1gbit",
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
