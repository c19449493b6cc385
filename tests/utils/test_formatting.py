"""Numbers, durations and tables as text."""

import pytest

from tfdist.utils.formatting import align_columns, format_duration, table_with_total


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0 s"),
        (0, "0 s"),
        (59.9, "59 s"),
        (119.9, "119 s"),
        (120, "2 min"),
        (7199, "119 min"),
        (7200, "2 h 0 min"),
        (48 * 3600 - 1, "47 h 59 min"),
        (48 * 3600, "2 d 0 h"),
    ],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


def test_columns_are_as_wide_as_their_widest_cell():
    rows = [["name", "bytes", "status"], ["a", "1,000,000", "ok"], ["longer", "2", ""]]
    assert align_columns(rows, left=(0, 2)) == [
        "name        bytes  status",
        "a       1,000,000  ok",
        "longer          2",
    ]


def test_rules_stand_below_the_headings_and_above_the_total():
    assert table_with_total([["worker", "steps"], ["0", "103"], ["total", "103"]]) == [
        "worker  steps",
        "-------------",
        "0         103",
        "-------------",
        "total     103",
    ]
