"""`tfdist plan --simulate`: what it writes, from earlier measurements, and what it says about invalid options."""

import json
from pathlib import Path

import measured_networks
import pytest

from tfdist.launch.cli.main import main
from tfdist.planning.plans import PlanFile
from tfdist.planning.topology import parse_topology

TOPOLOGY = "rack:8x8,10gbit,0.05ms/1gbit,0.5ms"


@pytest.fixture
def probe(tmp_path: Path) -> str:
    """A file of measurements."""
    path = tmp_path / "plan.json"
    measured = measured_networks.from_two_workers().to_json()
    path.write_text(json.dumps(PlanFile([], [], measured, {}).to_json()))
    return str(path)


def test_simulation_of_earlier_measurements(probe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, picture = tmp_path / "simulation.json", tmp_path / "simulation.svg"
    arguments = ["--workers", "2..4096", "--topology", TOPOLOGY, "--memory", "16GiB", "--allow-compression"]
    files = ["--json", str(output), "--picture", str(picture)]
    assert (
        main(["plan", "--probe", probe, "--simulate", *arguments, "--mtbf", "30d", "--price-per-hour", "2", *files])
        == 0
    )
    text = capsys.readouterr().out
    for part in ("weak scaling", "4096*", "goodput", "price of 1M samples", "has 64 hosts"):
        assert part in text
    assert picture.stat().st_size > 10_000
    file = PlanFile.read(output)
    assert file.simulation is not None and file.simulation["cluster"]["topology"] == TOPOLOGY
    assert {point["workers"] for point in file.simulation["points"]} == {2**power for power in range(1, 13)}
    assert not file.plans  # which tfdist run --plan would start
    assert file.link["bytes_per_second"] == parse_topology(TOPOLOGY).port.bytes_per_second
    restart = {point["goodput"] for point in file.simulation["points"] if point["workers"] == 4096}
    assert all(0.5 < part < 1 for part in restart)


def test_simulation_in_which_nothing_fits(probe: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--workers", "2", "--topology", "flat,1gbit", "--memory", "1MB"]
    assert main(["plan", "--probe", probe, "--simulate", *arguments]) == 1
    assert "There is no plan for any of the simulated numbers of workers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", TOPOLOGY], "Options of a simulation without it. Received: --topology."),
        (["--sharded-files", "--scaling", "strong"], "Received: --scaling, --sharded-files. Expected: --simulate"),
        (["--mtbf", "30d", "--price-per-hour", "1"], "Received: --mtbf, --price-per-hour. Expected: --simulate"),
        (["--simulate", "--workers", "2..8"], "A simulation needs a network."),
        (["--simulate", "--topology", TOPOLOGY], "A simulation needs numbers of workers."),
        (
            ["--simulate", "--topology", TOPOLOGY, "--workers", "2", "--link", "1gbit"],
            "The network of a simulation is its topology.",
        ),
        (
            ["--simulate", "--topology", TOPOLOGY, "--workers", "2", "--speeds", "1,0.5"],
            "Simulated workers are as fast as the measured one.",
        ),
        (
            ["--simulate", "--topology", TOPOLOGY, "--workers", "2", "--restart-time", "1min"],
            "A restart needs failures.",
        ),
        (
            ["--simulate", "--topology", TOPOLOGY, "--workers", "2", "--picture", "simulation.gif"],
            "Unknown format of a picture.",
        ),
        (["--simulate", "--topology", "rack:8x8", "--workers", "2"], "Invalid topology. Received: 'rack:8x8'."),
        (["--simulate", "--topology", "flat,0gbit", "--workers", "2"], "Invalid rate of a link. Received: '0gbit'."),
        (["--simulate", "--topology", TOPOLOGY, "--workers", "8..2"], "Invalid numbers of workers."),
        (["--simulate", "--topology", TOPOLOGY, "--workers", "2..99999999"], "Invalid numbers of workers."),
        (["--simulate", "--topology", TOPOLOGY, "--workers", "0..8"], "Invalid numbers of workers."),
        (["--simulate", "--topology", TOPOLOGY, "--workers", "2", "--mtbf", "0d"], "The duration is 0."),
        (["--simulate", "--topology", TOPOLOGY, "--workers", "2", "--mtbf", "30"], "Invalid duration. Received: '30'."),
        (["--simulate", "--topology", TOPOLOGY, "--workers", "2", "--price-per-hour", "-1"], "Invalid price."),
        (["--simulate", "--topology", TOPOLOGY, "--workers", "2", "--price-per-hour", "nan"], "Invalid price."),
        (["--simulate", "--topology", TOPOLOGY, "--workers", "2", "--scaling", "both"], "invalid choice: 'both'"),
    ],
)
def test_invalid_options(probe: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--probe", probe, *arguments]) == 2
    assert message in capsys.readouterr().err
