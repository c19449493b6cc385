"""A simulation: against published step times of 2, 3 and 4 workers, its scaling, failures, prices, text and picture."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import measured_networks
import pytest

from tfdist.planning.cost_terms import Conditions
from tfdist.planning.link_costs import LinkSpeed
from tfdist.planning.measurements import LayerMeasurement, Measurements
from tfdist.planning.plans import Plan
from tfdist.planning.predict_data_parallel import DataParallel, predict_data_parallel
from tfdist.planning.search import find_plans
from tfdist.planning.simulation import (
    STRONG,
    FailureCosts,
    SimulatedCluster,
    Simulation,
    kind_of,
    program_of,
    simulate,
)
from tfdist.planning.simulation_report import check_picture, draw, simulation_text
from tfdist.planning.topology import Topology, parse_topology

MONTH = 30 * 86400.0
CONDITIONS = Conditions(LinkSpeed(1e9), 16 * 10**9, allow_compression=True, allow_local_updates=True)


def plans_of(measured: Measurements, link: LinkSpeed, workers: int) -> list[Plan]:
    return find_plans(measured, dataclasses.replace(CONDITIONS, link=link), workers).plans


def simulated(topology: str = "rack:8x4,10gbit,0.05ms/1gbit,0.5ms", **options: Any) -> Simulation:
    measured = options.pop("measured", measured_networks.from_two_workers())
    workers = options.pop("workers", (2, 4, 8, 16, 64))
    return simulate(measured, SimulatedCluster(workers, parse_topology(topology), **options), plans_of)


@pytest.mark.parametrize("link", ["unshaped", "1 Gbit/s", "100 Mbit/s"])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_published_step_times(workers: int, link: str) -> None:
    # The benchmark pins worker 2 to the core of worker 0, and worker 3 to that of worker 1: with 3 workers one of them
    # has a core, but the others, which it waits for, have half a core each, as with 4.
    measured = measured_networks.from_two_workers(core_share=1.0 if workers == 2 else 0.5)
    network = Topology(link, LinkSpeed(measured_networks.achieved_bytes_per_second(workers, link)))
    cluster = SimulatedCluster((workers,), network)
    conditions = dataclasses.replace(CONDITIONS, link=network.link(workers), memory_bytes=10**12)
    for method in measured_networks.METHODS:
        program = program_of(measured, cluster, workers)
        predicted = predict_data_parallel(program, conditions, workers, DataParallel(method)).step_seconds
        published = measured_networks.median_seconds(workers, link, method)
        # The bar is 20 %. More than two workers exchange int8 in two phases, which encode and decode a second time;
        # that was not measured by the run of two workers from which these predictions are made.
        bar = 0.36 if method == "int8" and workers > 2 else 0.2
        if method == "uncompressed" and (workers, link) == (3, "1 Gbit/s"):
            bar = 0.25  # senders that compete for a receiver's link leave others idle, which nothing here predicts
        assert predicted == pytest.approx(published, rel=bar), method


def test_weak_scaling_keeps_the_samples_of_a_worker() -> None:
    simulation = simulated("flat,1000gbit")
    for point in simulation.of_kind("uncompressed"):
        assert point.samples == measured_networks.ROWS * point.workers
        assert point.efficiency == pytest.approx(
            point.samples_per_second / point.workers * measured_networks.from_two_workers().program.steps[0].seconds
            / measured_networks.ROWS
        )  # fmt: skip
        assert point.efficiency < 1


def test_strong_scaling_divides_the_batch_and_ends_with_one_sample_each() -> None:
    simulation = simulated("flat,1000gbit", scaling=STRONG, workers=(2, 64, 128))
    assert {point.samples for point in simulation.points} == {measured_networks.ROWS}
    assert list(simulation.left_out) == [128]
    assert "No plan for 128 workers: less than one sample each" in simulation_text(simulation)
    weak = simulated("flat,1000gbit", workers=(2,)).of_kind("uncompressed")[0]
    assert simulation.of_kind("uncompressed")[0].plan.step_seconds < weak.plan.step_seconds


def test_racks_cost_more_than_a_flat_network() -> None:
    rack, flat = simulated(), simulated("flat,10gbit,0.05ms")
    for here, there in zip(rack.of_kind("uncompressed"), flat.of_kind("uncompressed"), strict=True):
        assert (here.plan.step_seconds == there.plan.step_seconds) == (here.workers <= 8)


def test_more_racks_than_there_are_are_marked() -> None:
    simulation = simulated()
    assert {point.workers for point in simulation.points if not point.exists} == {64}
    text = simulation_text(simulation)
    assert " 64*" in text and "has 32 hosts. For more workers, more racks like these are assumed." in text
    assert "assumed" not in simulation_text(simulated(workers=(32,)))


def test_each_kind_has_its_fastest_plan() -> None:
    simulation = simulated(workers=(4,))
    assert set(simulation.kinds()) == {"accumulated", "compressed", "local updates", "sharded state", "uncompressed"}
    plans = plans_of(program_of(measured_networks.from_two_workers(), simulation.cluster, 4), parse_topology(
        "rack:8x4,10gbit,0.05ms/1gbit,0.5ms").link(4), 4)  # fmt: skip
    compressed = [plan for plan in plans if plan.compression and "shard_optimizer_state" not in plan.code]
    synchronous = [plan for plan in compressed if "mode=" not in plan.code and "accumulation" not in plan.code]
    fastest = max(synchronous, key=lambda plan: plan.samples_per_second)
    assert simulation.of_kind("compressed")[0].plan == fastest


def test_plans_that_do_not_fit_are_left_out() -> None:
    def nothing(measured: Measurements, link: LinkSpeed, workers: int) -> list[Plan]:
        return []

    cluster = SimulatedCluster((2, 4), parse_topology("flat,1gbit"))
    simulation = simulate(measured_networks.from_two_workers(), cluster, nothing)
    assert not simulation.points
    assert simulation_text(simulation).startswith("There is no plan for any of the simulated numbers of workers")


def test_stages_are_simulated_where_nothing_else_fits() -> None:
    measured = measured_networks.from_two_workers()
    layers = tuple(LayerMeasurement(name, 0.02, 3 * 10**6, 10**4) for name in "abcd")
    program = dataclasses.replace(measured.program, is_functional=True, layers=layers)
    functional = dataclasses.replace(measured, program=program)
    assert "stages" not in simulated(measured=functional).kinds()
    least = min(
        plan.memory_bytes for plan in plans_of(functional, LinkSpeed(1e9), 4) if kind_of(plan) not in (None, "stages")
    )

    def small(measured: Measurements, link: LinkSpeed, workers: int) -> list[Plan]:
        return [plan for plan in plans_of(measured, link, workers) if plan.memory_bytes < least]

    simulation = simulate(functional, SimulatedCluster((4,), parse_topology("flat,1gbit")), small)
    assert simulation.kinds() == ["stages"]


def test_data_that_every_worker_reads_completely() -> None:
    measured = measured_networks.from_two_workers()
    slow = dataclasses.replace(measured, program=dataclasses.replace(measured.program, data_seconds=0.01))
    whole = simulated("flat,1000gbit", measured=slow).of_kind("uncompressed")
    files = simulated("flat,1000gbit", measured=slow, files_are_sharded=True).of_kind("uncompressed")
    assert "add --sharded-files" in simulation_text(simulated("flat,1000gbit", measured=slow))
    assert "--sharded-files" not in simulation_text(simulated("flat,1000gbit", measured=slow, files_are_sharded=True))
    for one, other in zip(whole, files, strict=True):  # N batches instead of one
        assert one.plan.step_seconds - other.plan.step_seconds == pytest.approx(0.01 * (one.workers - 1))


def test_stragglers() -> None:
    measured = measured_networks.from_two_workers()
    step = dataclasses.replace(measured.program.steps[0], deviation_seconds=0.01)
    varying = dataclasses.replace(measured, program=dataclasses.replace(measured.program, steps=(step,)))
    waits = [point.straggler_seconds for point in simulated("flat,10gbit", measured=varying).of_kind("uncompressed")]
    assert waits == sorted(waits) and waits[0] == pytest.approx(0.0056, rel=0.1)  # 1 / sqrt(pi) deviations for two
    assert {point.straggler_seconds for point in simulated("flat,10gbit").points} == {0.0}


def test_failures_and_prices() -> None:
    costs = FailureCosts(MONTH, save_seconds=2.0, restart_seconds=60.0)
    simulation = simulated(failures=costs, price_per_hour=3.6)
    for point in simulation.of_kind("uncompressed"):
        assert point.checkpoint_seconds == pytest.approx((2 * 2.0 * MONTH / point.workers) ** 0.5, rel=0.01)
        cost = point.workers * 3.6 / 3600 / (point.samples_per_second * point.goodput) * 1e6
        assert point.cost_per_million_samples == pytest.approx(cost)
    parts = [point.goodput for point in simulation.of_kind("uncompressed")]
    assert parts == sorted(parts, reverse=True) and 0.9 < parts[-1] < parts[0] < 1
    text = simulation_text(simulation)
    assert all(title in text for title in ("save every", "goodput", "price of 1M samples", "of an epoch"))


def test_hosts_that_fail_all_the_time_leave_nothing() -> None:
    simulation = simulated(failures=FailureCosts(10.0, 5.0, 60.0), price_per_hour=1.0, workers=(1024,))
    assert {point.goodput for point in simulation.points} == {0.0}
    assert {point.cost_per_million_samples for point in simulation.points} == {None}
    assert " 0 %" in simulation_text(simulation)


def test_json() -> None:
    document = json.loads(json.dumps(simulated(price_per_hour=1.0).to_json()))
    assert document["cluster"]["topology"] == "rack:8x4,10gbit,0.05ms/1gbit,0.5ms"
    for point in document["points"]:
        assert point["cost_per_epoch"] == pytest.approx(point["cost_per_million_samples"] * 0.06)
        assert point["plan"]["step_seconds"] > 0


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_picture(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"simulation.{ending}"
    draw(simulated(failures=FailureCosts(MONTH, 2.0, 60.0), price_per_hour=1.0), path)
    assert path.stat().st_size > 10_000
    if ending == "svg":
        text = path.read_text()
        assert (
            all(label in text for label in ("goodput", "efficiency", "uncompressed", "more racks")) or "glyph" in text
        )


def test_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"Drawing needs Matplotlib\. Received: .* pip install 'tfdist\[plan\]'"):
        check_picture(tmp_path / "simulation.png")


def test_picture_of_another_format(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Unknown format of a picture\. Received: .*simulation\.txt"):
        check_picture(tmp_path / "simulation.txt")
    with pytest.raises(ValueError, match="The directory of the picture is missing"):
        check_picture(tmp_path / "missing" / "simulation.png")
