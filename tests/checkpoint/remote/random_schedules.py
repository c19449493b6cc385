"""Random schedules of trainings on a simulated store: requests fail, workers are killed, and old ones wake up."""

import collections
import random

import numpy as np
from simulated_objects import FaultyFileSystem, Killed, World, objects_of

from tfdist.checkpoint import CheckpointError, RemoteStoreError, Shard
from tfdist.checkpoint.errors import SupersededError
from tfdist.checkpoint.remote.remote_store import RemoteStore

_TRIES = 1000


def shards(seed: int, step: int) -> dict[str, Shard]:
    """What a training has after a step."""
    content = np.random.default_rng([seed, step]).integers(0, 255, 40, np.uint8)
    return {"shared_shard": Shard({"weights": content}, {"step": step}), "rank_shard": Shard({"own": content[:3]})}


def run(seed: int, *, honours: bool = True) -> collections.Counter[str]:
    """Trains in several lives, and counts what happened. "lost" and "wrong" must not."""
    chance, world, counts = random.Random(seed), World(seed, honours=honours), collections.Counter[str]()
    announced, sleeper = 0, None

    def until_answered(call):
        for _ in range(_TRIES):
            try:
                return call()
            except RemoteStoreError:
                counts["given up"] += 1
        raise AssertionError("the store never answers")

    def save(store, attempt, step):
        return store.save(step, attempt, rank=0, num_ranks=1, metadata={"step": step}, **shards(seed, step))

    for life in range(chance.randint(2, 5)):
        file_system = FaultyFileSystem(world, chance.choice((0.02, 0.1, 0.2)))
        objects = objects_of(file_system, patience_seconds=chance.choice((1.0, 4.0)))
        store = RemoteStore("simulated://bucket/run", keep=chance.randint(1, 3), objects=objects, beat_seconds=0)
        store.lock()._objects.connection.is_probed = True
        if chance.random() < 0.85:
            file_system.requests_left = chance.randint(1, 400)
        try:
            until_answered(store.lock().acquire)
            if sleeper is not None and chance.random() < 0.6:  # one that was taken for dead
                try:
                    save(sleeper, f"life-{life - 1}", 10**8 * life)
                    counts["wrong: saved after its end"] += 1
                except SupersededError:
                    counts["noticed"] += 1
                except RemoteStoreError:
                    counts["given up"] += 1
                sleeper = None
            checkpoint, skipped = until_answered(store.newest)
            counts["restored"] += 1
            counts["skipped"] += len(skipped)
            step = checkpoint.sequence if checkpoint is not None else 0
            counts["lost"] += step < announced
            if checkpoint is not None:
                found = checkpoint.read_shared()
                right = shards(seed, step)["shared_shard"]
                same = found.tensors["weights"].tobytes() == right.tensors["weights"].tobytes()
                counts["wrong"] += not (same and found.metadata == {"step": step})
                counts["found that was unknown"] += step > announced
            announced = step
            until_answered(store.remove_unfinished)
            for _ in range(chance.randint(2, 9)):
                step += 1
                try:
                    save(store, f"life-{life}", step)
                    announced = step
                    counts["announced"] += 1
                except RemoteStoreError:
                    counts["given up"] += 1
            sleeper = store
            file_system.requests_left = None
        except Killed:
            counts["killed"] += 1
            sleeper = None
        except CheckpointError as error:
            counts[f"wrong: {error}"] += 1
            break
    counts["faults"] = world.faults
    return counts
