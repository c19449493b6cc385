"""No checkpoint that was announced is lost, whatever fails when."""

import collections

import pytest
import random_schedules


def _run(seeds, **options):
    counts = collections.Counter()
    for seed in seeds:
        counts += random_schedules.run(seed, **options)
    return counts


def _wrong(counts):
    return {name: count for name, count in counts.items() if name == "lost" or name.startswith("wrong")}


def _check(counts):
    assert not _wrong(counts), counts
    for happened in ("faults", "killed", "noticed", "found that was unknown", "given up", "announced"):
        assert counts[happened], f"not tested: {happened}"


def test_schedules():
    _check(_run(range(25)))


@pytest.mark.long
def test_many_schedules():
    _check(_run(range(100, 3100)))


def test_the_condition_is_what_protects():
    assert _wrong(_run(range(12), honours=False)), "schedules that find nothing prove nothing"
