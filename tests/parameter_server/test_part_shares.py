"""Parts of rounds that follow the speeds of workers, and functions that wait for a preferred worker."""

import threading
import time
from types import SimpleNamespace

import pytest

from tfdist.load_balancing.share_planning import LoadBalancing
from tfdist.parameter_server.batch_split import PartShares
from tfdist.tensorflow_internals import cluster_coordinator as preferred_workers


def run(shares, seconds_per_row, rounds, rows=64):
    for _ in range(rounds):
        sizes = shares.sizes(rows)
        measured = {w: (0.001 + size * seconds_per_row[w], size) for w, size in enumerate(sizes) if size}
        shares.add_round(max(seconds for seconds, _ in measured.values()), measured)
    return sizes


def test_parts_follow_the_speeds_in_few_sizes():
    shares = PartShares(2, LoadBalancing(every_steps=5))
    assert run(shares, [0.001, 0.003], 40) == [48, 16]
    assert shares.shares == (0.75, 0.25)
    assert sorted(run(shares, [0.001, 0.001], 60)) == [32, 32]


def test_a_worker_whose_part_another_one_computes_keeps_its_share():
    shares = PartShares(2, LoadBalancing(every_steps=5))
    run(shares, [0.001, 0.003], 40)
    for _ in range(20):
        shares.add_round(0.05, {0: (0.05, 48)})
    assert shares.sizes(64) == [48, 16]


def test_the_first_parts_keep_the_limits():
    assert PartShares(2, LoadBalancing(max_share=(0.25, 1.0))).sizes(64) == [16, 48]


def test_equal_parts_stay_without_load_balancing():
    shares = PartShares(2, None)
    run(shares, [0.001, 0.1], 40)
    assert not shares.follows_speeds
    assert shares.sizes(7) == [4, 3]


class Coordinator:
    """TensorFlow's queue with functions that are strings."""

    def __init__(self):
        self._cluster = SimpleNamespace(closure_queue=preferred_workers.CoordinatorQueue())
        with preferred_workers.preferring(self, 0):
            pass

    def put(self, name, worker):
        closure = SimpleNamespace(name=name, mark_cancelled=lambda: None)
        with preferred_workers.preferring(self, worker):
            self._cluster.closure_queue.put(closure)
        return closure

    def get(self, worker, timeout=0.001):
        closure = self._cluster.closure_queue.get(timeout=timeout, tag=worker)
        return closure and closure.name


@pytest.fixture
def coordinator():
    coordinator = Coordinator()
    yield coordinator
    coordinator._cluster.closure_queue.stop()


@pytest.fixture
def patient(monkeypatch):
    """Each function waits for its worker, however late its thread is."""
    monkeypatch.setattr(preferred_workers, "_SECONDS_FOR_PREFERRED", 600.0)


def test_each_worker_gets_what_was_made_for_it(coordinator, patient):
    for worker in (1, 0, None):
        coordinator.put(f"for {worker}", worker)
    assert [coordinator.get(0), coordinator.get(0), coordinator.get(1)] == ["for 0", "for None", "for 1"]
    assert coordinator.get(0) is None


def test_another_worker_gets_it_if_the_preferred_one_does_not_take_it(coordinator):
    began = time.monotonic()
    coordinator.put("for 1", 1)
    assert coordinator.get(0) == "for 1"
    assert time.monotonic() - began >= preferred_workers._SECONDS_FOR_PREFERRED


def test_a_function_of_a_lost_worker_is_given_to_the_next_one(coordinator):
    lost = coordinator.put("for 1", 1)
    assert coordinator.get(1) == "for 1"
    coordinator._cluster.closure_queue.put_back(lost)
    assert coordinator.get(0) == "for 1"


def test_the_preferred_worker_is_woken_although_others_wait(coordinator, patient):
    taken = {}

    def wait(worker):
        taken[worker] = coordinator.get(worker, timeout=None)

    threads = [threading.Thread(target=wait, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    for worker in (2, 0, 1):
        coordinator.put(f"for {worker}", worker)
    for thread in threads:
        thread.join(60)
    assert taken == {worker: f"for {worker}" for worker in range(3)}
