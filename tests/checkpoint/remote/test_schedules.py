"""No checkpoint that was announced is lost, whatever fails when."""

import collections
import time

import pytest
import random_schedules
from optional_packages import require
from s3_server import s3_server

_RATES = {
    "unavailable": 0.04,
    "slow down": 0.02,
    "expired": 0.02,
    "reset": 0.03,
    "lost reply": 0.05,
    "late": 0.05,
    "old list": 0.6,
}


def _run(seeds, **options):
    counts = collections.Counter()
    for seed in seeds:
        lives = random_schedules.SimulatedLives(seed, **options)
        counts += random_schedules.run(seed, lives)
        counts["faults"] += lives.faults
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


class _S3Life:
    """A worker whose requests pass a proxy with faults. It is killed by the proxy, which then resets all of them."""

    def __init__(self, server, client, run, patience_seconds):
        self._server, self._client = server, client
        # Pauses are shortened: faults of the proxy pass by themselves.
        self.objects = server.objects(
            client, run, patience_seconds=patience_seconds, sleep=lambda seconds: time.sleep(seconds / 20)
        )

    def kill_after(self, requests):
        if requests is not None:
            self._server.control(requests_left={self._client: requests})

    def is_killed(self):
        return self._client in self._server.control()["killed"]


class _S3Lives:
    def __init__(self, server, seed):
        self._server, self._seed = server, seed
        server.control(rates=_RATES, seed=seed)

    def begin(self, life, chance):
        return _S3Life(self._server, f"s{self._seed}l{life}", f"run-{self._seed}", chance.choice((1.0, 4.0)))


def _run_on_s3(seeds):
    require("s3fs", "moto", "flask")
    with s3_server() as server:
        counts = collections.Counter()
        for seed in seeds:
            counts += random_schedules.run(seed, _S3Lives(server, seed))
        counts["faults"] = sum(server.control()["hits"].values())
    return counts


@pytest.mark.long
@pytest.mark.parametrize("first", range(100, 300, 50))
def test_schedules_on_s3(first):
    _check(_run_on_s3(range(first, first + 50)))
