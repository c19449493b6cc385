"""Estimates and suggestions, compared with the compressors and with the rules in the documentation."""

import re
from pathlib import Path

import pytest

from tfdist import compression
from tfdist.doctor.compression_advice import MATRIX_SIDE, PAYLOAD_BYTES, advise
from tfdist.doctor.link_measurement import LinkMeasurement

pytestmark = pytest.mark.usefixtures("cpus")
METHODS = ["uncompressed", "bf16", "int8", "powersgd:4", "topk:0.01"]


def link(bits_per_second, round_trip=0.0, back=None):
    rate = bits_per_second / 8
    return LinkMeasurement("worker 0", "worker 1", round_trip, 0.0, 0.0, rate, back / 8 if back else rate)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("matrices", [1, 7])
def test_sizes_are_those_of_the_compressors(method, matrices):
    shape = (MATRIX_SIDE, MATRIX_SIDE)
    compressor = compression.get("dense" if method == "uncompressed" else method)
    # The blocks of top-k do not fill a matrix.
    one = pytest.approx(compressor.payload_bytes(shape), rel=1e-3 if matrices > 1 else 0)
    assert PAYLOAD_BYTES[method](matrices * MATRIX_SIDE**2) / matrices == one


@pytest.mark.parametrize("method", METHODS)
def test_sizes_of_small_models(method):
    compressor = compression.get("dense" if method == "uncompressed" else method)
    assert PAYLOAD_BYTES[method](64 * 64) == compressor.payload_bytes((64, 64))


@pytest.mark.parametrize(
    ("mbits", "parameters", "workers", "suggestion"),
    [
        (28_000, 10_000_000, 2, None),
        (2_500, 100_000_000, 2, None),
        (958, 10_000_000, 2, "powersgd:4"),
        (958, 2_500_000, 2, "int8"),
        (958, 100_000, 2, None),  # 3 ms as it is
        (95.7, 10_000_000, 4, "powersgd:4"),
        (95.7, 10_000, 4, None),
        (9.6, 10_000_000, 2, "topk:0.01"),
        (9.6, 10_000_000, 21, "powersgd:4"),
        (9.6, 5_000, 2, "topk:0.01"),
    ],
)
def test_suggestions(mbits, parameters, workers, suggestion):
    advice = advise(parameters, workers, [link(mbits * 1e6)])
    assert advice.suggestion == suggestion
    assert (suggestion is None) == ("do not compress" in advice.reason)


def test_what_is_suggested_is_a_name_of_a_compressor_and_stands_in_the_page():
    page = (Path(__file__).parents[2] / "docs" / "compression.md").read_text()
    rules = page.partition("## Which one")[2].partition("## ")[0]
    for method in ("powersgd:4", "int8", "topk:0.01", "int4", "sign"):
        assert f'"{method}"' in rules
        compression.get(method)
    for advice in (advise(10**7, 2, [link(rate)]) for rate in (1e10, 1e9, 1e8, 1e7)):
        for name in re.findall(r'"([a-z0-9:.]+)"', advice.reason):
            assert f'"{name}"' in rules


def seconds(workers, bits_per_second=8e6, round_trip=0.0, parameters=1_000_000):
    advice = advise(parameters, workers, [link(bits_per_second, round_trip)])
    return {exchange.method: exchange.seconds for exchange in advice.exchanges}


def test_times_follow_bytes_and_workers():
    two, four = seconds(2), seconds(4)
    assert two["uncompressed"] == pytest.approx(4.0)  # 4 MB at 1 MB/s, 2 (N-1)/N times
    assert four["uncompressed"] == pytest.approx(6.0)
    assert two["bf16"] == pytest.approx(2.0) and four["bf16"] == pytest.approx(3.0)
    assert four["topk:0.01"] == pytest.approx(3 * two["topk:0.01"])
    assert list(two) == METHODS


def test_times_follow_round_trips():
    # A message takes half a round trip. Sums have two in turn, but short ones have one, as those of PowerSGD here.
    fast, slow = seconds(4), seconds(4, round_trip=1.0)
    waits = {method: slow[method] - fast[method] for method in fast}
    assert waits == pytest.approx(
        {"uncompressed": 1.0, "bf16": 1.0, "int8": 1.0, "powersgd:4": 1.0, "topk:0.01": 0.5}, abs=1e-9
    )
    large = seconds(4, round_trip=1.0, parameters=10**8), seconds(4, parameters=10**8)
    assert large[0]["powersgd:4"] - large[1]["powersgd:4"] == pytest.approx(2.0)
    assert seconds(2, round_trip=1.0)["int8"] - seconds(2)["int8"] == pytest.approx(0.5)


def test_the_slowest_link_counts():
    advice = advise(10**7, 3, [link(1e10, 0.001), link(1e9, 0.1, back=1e8), LinkMeasurement("a", "b", 5.0, 0.0, 0.0)])
    assert (advice.bytes_per_second, advice.round_trip_seconds) == (1e8 / 8, 0.1)


def test_no_advice_without_a_measurement():
    assert advise(10**7, 2, []) is None
    assert advise(10**7, 2, [LinkMeasurement("a", "b", 1.0, 0.0, 0.0)]) is None
    assert advise(10**7, 1, [link(1e9)]) is None
