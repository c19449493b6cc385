"""What workers exchange about paths and backups; each worker is a thread here, and TensorFlow runs in one process."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import tensorflow as tf

from tfdist import strategy_hooks
from tfdist.keras_internals.saved_files import SharedPaths
from tfdist.patches import replacements
from tfdist.strategies import MirroredStrategy, shared_paths
from tfdist.strategies.replicated_hooks import HOOKS
from tfdist.strategies.shared_paths import compare_starts, patch_files, share_paths

pytestmark = pytest.mark.usefixtures("cpus")
LIMIT_SECONDS = 30.0


class Worker:
    """The part of a strategy that the exchanges use."""

    _elastic = None

    def __init__(self, rank, rows, barrier):
        self.rank, self.num_workers, self._rows, self._barrier = rank, len(rows), rows, barrier

    def gather(self, value, axis):
        self._rows[self.rank] = value
        self._barrier.wait(LIMIT_SECONDS)
        return tf.concat(self._rows, axis)


def on_workers(function, *arguments):
    """What a function returns or raises on each worker, called with its worker and its arguments."""
    rows, barrier = [None] * len(arguments), threading.Barrier(len(arguments))

    def call(rank):
        try:
            return function(Worker(rank, rows, barrier), *arguments[rank])
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(call, range(len(arguments))))


def test_the_lowest_rank_with_a_path_writes_it():
    shared = on_workers(
        share_paths,
        (["/run/log.csv", "/run/0.csv"], False),
        (["/run/log.csv", "/run/1.csv", "/run/board"], False),
        (["/run/board", "/run/log.csv"], False),
        ([], False),
    )
    assert shared == [
        SharedPaths(frozenset(paths), has_backups=False)
        for paths in ((), ("/run/log.csv",), ("/run/board", "/run/log.csv"), ())
    ]


def test_a_worker_that_repeats_what_the_others_have_exchanged_writes_no_path(monkeypatch):
    monkeypatch.setattr(Worker, "_elastic", SimpleNamespace(starts_late=False, ranks_by_age=[]))
    assert on_workers(share_paths, (["/run/log.csv"], False)) == [SharedPaths(frozenset({"/run/log.csv"}), False)]


def test_what_elastic_workers_gather_is_gathered_again_when_one_is_lost(cpus):
    strategy, gathered = MirroredStrategy(cpus[:2]), []

    def run_alone(exchange):
        exchange()  # a worker is lost
        gathered.append(exchange().numpy().tolist())
        return gathered[-1]

    strategy._elastic = SimpleNamespace(run_alone=run_alone)
    assert strategy.gather(tf.constant([3]), axis=0) == [3] and gathered == [[3]]


def test_all_workers_know_of_a_backup_of_one():
    shared = on_workers(share_paths, ([], False), (["/backup"], True), ([], False))
    assert [each.has_backups for each in shared] == [True] * 3


def test_spellings_of_a_path_are_one_path_and_addresses_are_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    absolute, address = str(tmp_path / "log.csv"), "gs://bucket/log"
    shared = on_workers(share_paths, ([absolute, address], False), (["log.csv", "./other/../log.csv", address], False))
    assert shared[1].elsewhere == {"log.csv", "./other/../log.csv", address}
    # As for workers that started in other directories.
    inside = os.path.abspath(address)
    assert on_workers(share_paths, ([inside], False), ([address], False))[1].elsewhere == frozenset()


@pytest.mark.parametrize(
    ("starts", "received"),
    [
        ([(2, 4), (1, 4), (2, 4)], "epoch 2 after 4 updates on worker 0, epoch 1 after 4 updates on worker 1"),
        ([(2, 4), (2, 4), (2, 3)], "epoch 2 after 4 updates on worker 0, epoch 2 after 3 updates on worker 2"),
        ([(2, 4), (2, 4), (2, 4)], None),
    ],
)
def test_all_workers_get_the_error_of_different_backups(starts, received):
    errors = on_workers(compare_starts, *starts)
    assert errors == [errors[0]] * 3
    assert errors[0] is None if received is None else f"Received: {received}. Expected: the same" in errors[0]


def test_files_are_patched_once_in_a_process_for_strategies_of_several_workers(unpatched, monkeypatch):
    for _ in range(2):
        patch_files()
    saved = [one.name for one in replacements() if one.name.startswith("save_model")]
    assert saved == ["save_model", "save_model_to_hdf5"]
    monkeypatch.setitem(strategy_hooks._hooks, Worker, HOOKS)
    asked = [Worker(0, [None] * workers, None) for workers in (1, 2)]
    assert [shared_paths._has_workers(strategy) for strategy in (*asked, None, tf.distribute.get_strategy())] == [
        False,
        True,
        False,
        False,
    ]
