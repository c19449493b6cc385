"""No checkpoint that was announced is lost, whatever fails when."""

import collections

import pytest
import random_schedules


def _run(seeds, **options):
    counts = collections.Counter()
    for seed in seeds:
        lives = random_schedules.SimulatedLives(seed, **options)
        counts += random_schedules.run(seed, lives)
        counts["faults"] += lives.faults
    return counts


def _check(counts):
    assert not random_schedules.wrong(counts), counts
    for happened in ("faults", "killed", "noticed", "found that was unknown", "given up", "announced"):
        assert counts[happened], f"not tested: {happened}"


def test_schedules():
    _check(_run(range(20)))


@pytest.mark.long
def test_many_schedules():
    _check(_run(range(100, 3100)))


def test_the_condition_is_what_protects():
    assert random_schedules.wrong(_run(range(4), honours=False)), "schedules that find nothing prove nothing"
