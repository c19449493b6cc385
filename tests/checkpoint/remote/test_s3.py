"""Against S3, of which moto plays the server, as fsspec's library really behaves."""

import collections
import time

import numpy as np
import pytest
import random_schedules
from optional_packages import require
from s3_server import s3_server
from simulated_objects import Killed

from tfdist.checkpoint import RemoteStoreError, Shard
from tfdist.checkpoint.errors import SupersededError
from tfdist.checkpoint.remote import parts
from tfdist.checkpoint.remote.remote_store import RemoteStore
from tfdist.utils import remote_requests

require("s3fs", "moto", "flask")

_RATES = {
    "unavailable": 0.04,
    "slow down": 0.02,
    "expired": 0.005,  # of which each takes a while
    "reset": 0.02,
    "cut off": 0.02,
    "lost reply": 0.05,
    "late": 0.03,
    "after the next owner": 0.03,
    "late reply": 0.005,
    "late request": 0.005,
    "old list": 0.6,
}
_LIMIT_SECONDS = 0.3  # on a busy machine other requests exceed it, too: these are late ones


@pytest.fixture(scope="module")
def server():
    with s3_server() as server:
        yield server


def test_a_training_and_its_successor(server, monkeypatch):
    monkeypatch.setattr(parts, "BLOCK_BYTES", 5000)
    weights = np.random.default_rng(0).integers(0, 255, 12_000, np.uint8)

    def save(store, sequence):
        shards = {"rank_shard": Shard({}), "shared_shard": Shard({"weights": weights + np.uint8(sequence)})}
        return store.save(sequence, "a", rank=0, num_ranks=1, metadata={"step": sequence}, **shards)

    first, second = (RemoteStore("s3://bucket/run", objects=server.objects(name, "run")) for name in "ab")
    first.lock().acquire()
    connection = first._objects.connection
    assert connection.is_probed and connection.creates_once, "the second creation of the probe failed"
    save(first, 1)
    before = server.control(rates={"lost reply": 0.4}, seed=1)["hits"]
    save(first, 2)
    assert server.control(rates={}, seed=0)["hits"]["lost reply"] > before.get("lost reply", 0)
    second.lock().acquire()
    with pytest.raises(SupersededError):
        save(first, 3)
    newest, skipped = second.newest()
    assert newest.sequence == 2 and skipped == []
    assert np.array_equal(newest.read_shared().tensors["weights"], weights + np.uint8(2))
    assert [info.status for info in second.list_checkpoints()] == ["complete", "complete", "unfinished"]
    second.remove_unfinished()
    assert second.prune(1) and [info.sequence for info in second.list_checkpoints()] == [2]


class _Life:
    """A worker whose requests pass a proxy with faults, which kills it: its last request fails, and it has ended."""

    def __init__(self, server, client, run, patience_seconds):
        self._server, self._client = server, client
        self.objects = server.objects(client, run, patience_seconds=patience_seconds, sleep=self._sleep)

    def kill_after(self, requests):
        self._server.control(requests_left={self._client: requests})

    def _sleep(self, seconds):  # after each request that failed
        if self._client in self._server.control()["killed"]:
            raise Killed
        time.sleep(seconds / 20)  # faults of the proxy pass by themselves


class _Lives:
    are_concurrent = True

    def __init__(self, server, seed):
        self._server, self._seed = server, seed
        server.control(rates=_RATES, seed=seed, limit_seconds=_LIMIT_SECONDS)

    def begin(self, life, chance, patience_seconds):
        del chance
        return _Life(self._server, f"s{self._seed}l{life}", f"run-{self._seed}", patience_seconds)

    def deliver(self):
        self._server.control(deliver=True)


@pytest.mark.long
def test_200_schedules_of_all_faults(server, monkeypatch):
    monkeypatch.setattr(remote_requests, "_REQUEST_SECONDS", _LIMIT_SECONDS)
    before = collections.Counter(server.control()["hits"])
    counts = collections.Counter()
    for seed in range(100, 300):
        # Files of 170 and 300 bytes, of which some have several blocks.
        monkeypatch.setattr(parts, "BLOCK_BYTES", 100 if seed % 4 == 0 else 5000)
        counts += random_schedules.run(seed, _Lives(server, seed), most_requests=200)
        assert not random_schedules.wrong(counts), counts
    hits = collections.Counter(server.control(rates={}, seed=0)["hits"]) - before
    print(f"{dict(counts)}\nfaults: {hits.total()}, {dict(hits)}")
    for happened in ("killed", "noticed", "given up", "announced", "saves during a takeover"):
        assert counts[happened], f"not tested: {happened}"
    assert hits.keys() >= _RATES.keys()


def test_requests_that_are_executed_when_the_client_has_given_them_up(server, monkeypatch):
    limit = 1.0  # long enough for what is not delayed, also on a busy machine
    monkeypatch.setattr(remote_requests, "_REQUEST_SECONDS", limit)
    objects = server.objects("single", "single")
    server.control(rates={}, seed=0, limit_seconds=limit)
    for fault in ("late request", "late reply", "cut off", "lost reply", "after the next owner"):
        key = f"commits/{fault}"
        server.control(next={"single": [fault]})
        begun = time.monotonic()
        assert objects.create(key, b"mine") is None, "repeated, or found to be its own"
        assert time.monotonic() - begun > limit or "late" not in fault
        assert objects.create(key, b"other") == b"mine"
    server.control(next={"single": ["after the next owner", "cut off"]})
    objects.put(key, b"first")  # is repeated, twice
    objects.put(key, b"second")
    server.control(deliver=True)
    assert objects.get(key) == b"first"
    server.control(next={"single": ["cut off"] * 2})  # aiohttp repeats a request on a connection that it had kept
    with pytest.raises(RemoteStoreError):
        objects.for_operation(0.0).put("cut off", b"content")
    assert objects.get("cut off") is None
