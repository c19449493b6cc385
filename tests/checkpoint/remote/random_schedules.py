"""Random schedules of trainings on a faulty store: requests fail, workers are killed, and old ones wake up."""

import collections
import random

import numpy as np
from simulated_objects import FaultyFileSystem, Killed, World, objects_of

from tfdist.checkpoint import CheckpointError, RemoteStoreError, Shard
from tfdist.checkpoint.errors import SupersededError
from tfdist.checkpoint.remote.remote_store import RemoteStore

_TRIES = 1000


class SimulatedLife:
    """A worker's view of a simulated store."""

    def __init__(self, world, chance):
        self._file_system = FaultyFileSystem(world, chance.choice((0.02, 0.1, 0.2)))
        self.objects = objects_of(self._file_system, patience_seconds=chance.choice((1.0, 4.0)))

    def kill_after(self, requests):
        """Kills it in the middle of a request; None: never."""
        self._file_system.requests_left = requests

    def is_killed(self):
        """`Killed` is raised."""
        return False


class SimulatedLives:
    """A store in which time passes with requests."""

    def __init__(self, seed, *, honours=True):
        self._world = World(seed, honours=honours)

    def begin(self, life, chance):
        """Returns a new worker's view."""
        del life
        return SimulatedLife(self._world, chance)

    @property
    def faults(self):
        """How many requests have failed."""
        return self._world.faults


def run(seed, lives, *, numbers_of_requests=400):
    """Trains in several lives, and counts what happened. "lost" and "wrong" must not."""
    chance, counts = random.Random(seed), collections.Counter()
    announced, sleeper = 0, None

    def asked(life, call):
        try:
            return call()
        except RemoteStoreError:
            if life.is_killed():
                raise Killed from None
            counts["given up"] += 1
            raise

    def until_answered(life, call):
        for _ in range(_TRIES):
            try:
                return asked(life, call)
            except RemoteStoreError:
                pass
        raise AssertionError("the store never answers")

    for number in range(chance.randint(2, 5)):
        life = lives.begin(number, chance)
        store = RemoteStore("of://the/test", keep=chance.randint(1, 3), objects=life.objects, beat_seconds=0)
        life.objects.connection.is_probed = True  # with faults the answer of one probe is not certain
        life.kill_after(chance.randint(1, numbers_of_requests) if chance.random() < 0.85 else None)
        try:
            until_answered(life, store.lock().acquire)
            if sleeper is not None and chance.random() < 0.6:  # it was taken for dead
                try:
                    _save(sleeper, seed, f"life-{number - 1}", 10**8 * number)
                    counts["wrong: saved after its end"] += 1
                except SupersededError:
                    counts["noticed"] += 1
                except RemoteStoreError:
                    counts["given up"] += 1
                sleeper = None
            checkpoint, skipped = until_answered(life, store.newest)
            counts["restored"] += 1
            counts["skipped"] += len(skipped)
            step = checkpoint.sequence if checkpoint is not None else 0
            counts["lost"] += step < announced
            counts["found that was unknown"] += step > announced
            counts["wrong"] += checkpoint is not None and not _is_right(checkpoint, seed, step)
            announced = step
            store.remove_unfinished()
            for _ in range(chance.randint(2, 9)):
                step += 1
                try:
                    asked(life, lambda step=step: _save(store, seed, f"life-{number}", step))  # noqa: B023
                    announced = step
                    counts["announced"] += 1
                except RemoteStoreError:
                    pass
            sleeper = store
            life.kill_after(None)
        except Killed:
            counts["killed"] += 1
            sleeper = None
        except CheckpointError as error:
            counts[f"wrong: {error}"] += 1
            break
    return counts


def _shards(seed, step):
    content = np.random.default_rng([seed, step]).integers(0, 255, 40, np.uint8)
    return {"shared_shard": Shard({"weights": content}, {"step": step}), "rank_shard": Shard({"own": content[:3]})}


def _save(store, seed, attempt, step):
    return store.save(step, attempt, rank=0, num_ranks=1, metadata={"step": step}, **_shards(seed, step))


def _is_right(checkpoint, seed, step):
    found, right = checkpoint.read_shared(), _shards(seed, step)["shared_shard"]
    same = found.tensors["weights"].tobytes() == right.tensors["weights"].tobytes()
    return same and found.metadata == {"step": step}
