"""Readings of links: differences, averages, the table, and what a resumed training restores."""

from dataclasses import asdict

from fake_strategy import FakeStrategy

from tfdist.callbacks.communication_report import LinkReading
from tfdist.collectives import LinkStats

FIRST, SECOND = "/job:localhost/replica:0/task:0/device:CPU:0", "/job:worker/replica:0/task:1/device:CPU:0"
THERE, BACK = f"{FIRST} {SECOND}", f"{SECOND} {FIRST}"


def test_strategies_without_stages_have_no_links() -> None:
    assert LinkReading.of(FakeStrategy()) is None


def test_readings_subtract_and_are_restored() -> None:
    early = LinkReading({THERE: LinkStats(activation_bytes=100)})
    late = LinkReading({THERE: LinkStats(activation_bytes=300), BACK: LinkStats(activation_gradient_bytes=50)})
    assert late.since(early).links == {
        THERE: LinkStats(activation_bytes=200),
        BACK: LinkStats(activation_gradient_bytes=50),
    }
    assert late.since(None) == late == LinkReading.from_dict(asdict(late))
    assert late.logs(2) == {"activation_bytes": 150.0, "activation_gradient_bytes": 25.0}


def test_the_table_has_a_row_for_each_link() -> None:
    reading = LinkReading(
        {
            THERE: LinkStats(batch_bytes=1000, activation_bytes=3000, weight_bytes=500, prediction_bytes=500),
            BACK: LinkStats(activation_gradient_bytes=3000, weight_gradient_bytes=2000),
        }
    )
    assert reading.table(2).splitlines() == [
        "kB sent per update from device to device (2 updates):",
        "link                     batches  activations  their gradients  weight gradients  other  total",
        "-" * 94,
        "CPU:0 -> worker:1/CPU:0    0.500        1.500            0.000             0.000  0.500  2.500",
        "worker:1/CPU:0 -> CPU:0    0.000        0.000            1.500             1.000  0.000  2.500",
        "-" * 94,
        "total                      0.500        1.500            1.500             1.000  0.500  5.000",
    ]
    assert reading.table(0) == "There was no update: no gradients were exchanged."
