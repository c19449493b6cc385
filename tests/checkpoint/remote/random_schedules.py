"""Random schedules of trainings on a faulty store: requests fail, workers are killed, and old ones wake up."""

import collections
import random
import threading

import numpy as np
from simulated_objects import FaultyFileSystem, Killed, World, objects_of

from tfdist.checkpoint import CheckpointError, RemoteStoreError, Shard
from tfdist.checkpoint.errors import SupersededError
from tfdist.checkpoint.remote.remote_store import RemoteStore

_TRIES = 1000


class SimulatedLife:
    """A worker's view of a simulated store."""

    def __init__(self, world, fault_rate, patience_seconds):
        self._file_system = FaultyFileSystem(world, fault_rate)
        self.objects = objects_of(self._file_system, patience_seconds=patience_seconds)

    def kill_after(self, requests):
        """Kills it in the middle of a request; None: never."""
        self._file_system.requests_left = requests


class SimulatedLives:
    """A store in which time passes with requests."""

    are_concurrent = False

    def __init__(self, seed, *, honours=True):
        self._world = World(seed, honours=honours)

    def begin(self, life, chance, patience_seconds):
        """Returns a new worker's view."""
        del life
        return SimulatedLife(self._world, chance.choice((0.02, 0.1, 0.2)), patience_seconds)

    def deliver(self):
        """Lets all late requests arrive."""
        self._world.pass_time(60)

    @property
    def faults(self):
        """How many requests have failed."""
        return self._world.faults


def run(seed, lives, *, most_requests=400):
    """Trains in several lives, and counts what happened. A life that is killed has made at most so many requests."""
    counts = collections.Counter(schedules=1)
    try:
        _run(seed, lives, counts, most_requests)
    except CheckpointError as error:
        counts[f"wrong: {error}"] += 1
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    if wrong(counts):
        counts[f"wrong: seed {seed}"] += 1
    return counts


def wrong(counts):
    """Returns what must not have happened."""
    found = {name: count for name, count in counts.items() if count and name.startswith(("lost", "wrong"))}
    if counts["second writers"] != counts["noticed"]:
        found["not noticed"] = counts["second writers"] - counts["noticed"]
    return found


def _run(seed, lives, counts, most_requests):
    chance = random.Random(seed)
    announced, step, sleeper = 0, 0, None

    def until_answered(call):
        for _ in range(_TRIES):
            try:
                return call()
            except RemoteStoreError:
                counts["given up"] += 1
        raise AssertionError("the store never answers")

    def save(store, number, step):
        try:
            _save(store, seed, f"life-{number}", step)
        except RemoteStoreError:
            counts["given up"] += 1
            return False
        counts["announced"] += 1
        return True

    def save_meanwhile(store, number, step, steps):
        """The earlier owner saves while the next one takes the run over: its checkpoint counts, or it notices."""
        counts["saves during a takeover"] += 1
        try:
            if save(store, number, step):
                steps.append(step)
        except SupersededError:
            pass
        except Exception as error:
            counts[f"wrong: {error}"] += 1

    def wake(store, number):
        """It was taken for dead, and saves until it notices."""
        counts["second writers"] += 1
        for step in range(10**8 * (number + 1), 10**8 * (number + 1) + _TRIES):
            try:
                _save(store, seed, f"life-{number}", step)
            except SupersededError:
                counts["noticed"] += 1
                return
            except RemoteStoreError:
                counts["given up"] += 1
            else:
                counts["wrong: saved after its end"] += 1
                return

    def restore(store):
        checkpoint, skipped = until_answered(store.newest)
        counts["restored"] += 1
        counts["skipped"] += len(skipped)
        step = checkpoint.sequence if checkpoint is not None else 0
        counts["lost"] += step < announced
        counts["found that was unknown"] += step > announced
        counts["wrong"] += checkpoint is not None and not _is_right(checkpoint, seed, step)
        return step

    last = chance.randint(2, 5)
    for number in range(last + 1):
        # The last one only reads, when all has arrived.
        life = lives.begin(number, chance, 60.0 if number == last else chance.choice((1.0, 4.0)))
        store = RemoteStore("of://the/test", keep=chance.randint(1, 3), objects=life.objects, beat_seconds=0)
        life.objects.connection.is_probed = True  # with faults the answer of one probe is not certain
        lock = store.lock()
        if number == last:
            lives.deliver()
            until_answered(lock.acquire)
            restore(store)
            return
        life.kill_after(chance.randint(1, most_requests) if chance.random() < 0.85 else None)
        is_woken, is_concurrent = chance.random() < 0.6, chance.random() < 0.5
        try:
            if sleeper is not None and lives.are_concurrent and is_concurrent:
                saved = []
                thread = threading.Thread(target=save_meanwhile, args=(sleeper, number - 1, step + 1, saved))
                thread.start()
                try:
                    until_answered(lock.acquire)
                finally:
                    thread.join()
                    announced = max([announced, *saved])
            else:
                until_answered(lock.acquire)
            if sleeper is not None and is_woken:
                wake(sleeper, number - 1)
            sleeper = None
            announced = step = restore(store)
            store.remove_unfinished()
            for _ in range(chance.randint(2, 9)):
                step += 1
                if save(store, number, step):
                    announced = step
            life.kill_after(None)
            sleeper = store
        except Killed:
            counts["killed"] += 1
            sleeper = None


def _shards(seed, step):
    content = np.random.default_rng([seed, step]).integers(0, 255, 40, np.uint8)
    return {"shared_shard": Shard({"weights": content}, {"step": step}), "rank_shard": Shard({"own": content[:3]})}


def _save(store, seed, attempt, step):
    return store.save(step, attempt, rank=0, num_ranks=1, metadata={"step": step}, **_shards(seed, step))


def _is_right(checkpoint, seed, step):
    right = _shards(seed, step)
    found = {"shared_shard": checkpoint.read_shared(), "rank_shard": checkpoint.read_rank(0)}
    return checkpoint.metadata["step"] == step and all(
        found[name].metadata == shard.metadata
        and found[name].tensors.keys() == shard.tensors.keys()
        and all(found[name].tensors[key].tobytes() == value.tobytes() for key, value in shard.tensors.items())
        for name, shard in right.items()
    )
