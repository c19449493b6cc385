"""Against S3, of which moto plays the server, as fsspec's library really behaves."""

import numpy as np
import pytest
from optional_packages import require
from s3_server import s3_server

from tfdist.checkpoint import Shard
from tfdist.checkpoint.errors import SupersededError
from tfdist.checkpoint.remote import parts
from tfdist.checkpoint.remote.remote_store import RemoteStore

require("s3fs", "moto", "flask")


def test_a_training_and_its_successor(monkeypatch):
    monkeypatch.setattr(parts, "BLOCK_BYTES", 5000)
    weights = np.random.default_rng(0).integers(0, 255, 12_000, np.uint8)

    def save(store, sequence):
        shards = {"rank_shard": Shard({}), "shared_shard": Shard({"weights": weights + np.uint8(sequence)})}
        return store.save(sequence, "a", rank=0, num_ranks=1, metadata={"step": sequence}, **shards)

    with s3_server() as server:
        first, second = (RemoteStore("s3://bucket/run", objects=server.objects(name, "run")) for name in "ab")
        first.lock().acquire()
        connection = first._objects.connection
        assert connection.is_probed and connection.creates_once, "the second creation of the probe failed"
        save(first, 1)
        server.control(rates={"lost reply": 0.4}, seed=1)
        save(first, 2)
        assert server.control(rates={}, seed=0)["hits"]["lost reply"] > 0
        second.lock().acquire()
        with pytest.raises(SupersededError):
            save(first, 3)
        newest, skipped = second.newest()
        assert newest.sequence == 2 and skipped == []
        assert np.array_equal(newest.read_shared().tensors["weights"], weights + np.uint8(2))
        assert [info.status for info in second.list_checkpoints()] == ["complete", "complete", "unfinished"]
        second.remove_unfinished()
        assert second.prune(1) and [info.sequence for info in second.list_checkpoints()] == [2]
