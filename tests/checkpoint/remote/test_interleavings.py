"""What two processes, or a request that arrives late, can do to each other: tried at every request."""

import contextlib

import pytest
from simulated_objects import FaultyFileSystem, World, objects_of

from tfdist.checkpoint import CheckpointError, RemoteStoreError
from tfdist.checkpoint.remote import run_ownership
from tfdist.checkpoint.remote.remote_store import RemoteStore


class Watched(FaultyFileSystem):
    """Calls `meanwhile` before its request number `at`; requests that write to a commit in the mode `lost` fail."""

    def __init__(self, world):
        super().__init__(world)
        self.requests, self.at, self.meanwhile, self.lost, self.late = 0, -1, None, None, []

    def pipe_file(self, path, content, mode="overwrite"):
        if self.lost == mode and "/commits/" in path:
            self.late.append((path, content, mode))
            self.world.pass_time(1)
            raise OSError("Connection reset by peer")
        super().pipe_file(path, content, mode)

    def _request(self, failure):
        super()._request(failure)
        self.requests += 1
        if self.requests == self.at:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()


def opened(file_system, **options):
    return RemoteStore("simulated://run", objects=objects_of(file_system), beat_seconds=0, **options)


def numbers(world):
    newest, skipped = opened(FaultyFileSystem(world)).newest()
    return None if newest is None else newest.sequence, skipped


def _continue(file_system, store, save):
    del file_system
    save(store, 3, attempt="a")


def _follow(file_system, store, save):
    del store
    store = opened(file_system, keep=1)
    store.lock().acquire()
    assert store.newest()[0] is not None
    store.remove_unfinished()
    save(store, 3, attempt="b")


@pytest.mark.parametrize("following", [_continue, pytest.param(_follow, marks=pytest.mark.long)])
@pytest.mark.parametrize(("lost", "announced"), [("create", 1), ("overwrite", 2)], ids=["commit", "removal"])
def test_what_arrives_late_hides_no_checkpoint(save, following, lost, announced):
    at = 0
    while True:
        at += 1
        file_system = Watched(World())
        store = opened(file_system, keep=1)
        store.lock().acquire()
        save(store, 1, attempt="a")
        file_system.lost = lost
        with contextlib.suppress(RemoteStoreError):  # "It is unknown whether checkpoint 2 is committed"
            save(store, 2, attempt="a")
        file_system.lost, file_system.requests, file_system.at = None, 0, at
        seen = []

        def arrive(file_system=file_system, seen=seen):
            assert file_system.late
            for request in file_system.late:
                file_system.world.apply(*request)
            seen.append(numbers(file_system.world))

        file_system.meanwhile = arrive
        following(file_system, store, save)
        assert numbers(file_system.world) == (3, []), at
        if file_system.meanwhile is not None:
            return
        assert seen in [[(number, [])] for number in range(announced, 4)], at


def test_a_process_that_was_taken_for_dead_removes_nothing_of_the_next(save, assert_complete):
    world = World()
    first, second = (opened(FaultyFileSystem(world), peer_timeout_seconds=0.01) for _ in range(2))
    first.lock().acquire()
    save(first, 1, attempt="a")
    second.lock().acquire()
    save(second, 2, attempt="b", num_ranks=2, ranks=[1])
    first.remove_unfinished()
    opened(FaultyFileSystem(world)).remove_unfinished()
    save(second, 2, attempt="b", num_ranks=2, ranks=[0])
    assert_complete(second.newest()[0], 2, num_ranks=2)


def test_a_checkpoint_that_is_removed_while_it_is_read_is_not_missed(save, assert_complete):
    at = 0
    while True:
        at += 1
        world, reader = World(), None
        owner = opened(FaultyFileSystem(world), keep=1)
        save(owner, 1)
        reader = Watched(world)
        reader.at, reader.meanwhile = at, lambda owner=owner: save(owner, 2)
        newest, skipped = opened(reader).newest()
        assert newest is not None and skipped == [], at
        assert_complete(newest, newest.sequence)
        if reader.meanwhile is not None:
            return


def test_pruning_does_not_disturb_a_training(save, monkeypatch):
    world = World()
    training = opened(FaultyFileSystem(world), peer_timeout_seconds=0.01)
    training.lock().acquire()
    save(training, 1)
    save(training, 2, num_ranks=2, ranks=[1])
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="Another process trains in this dir"):
        patch.setattr(run_ownership, "_shows_itself", lambda *_: True)
        opened(FaultyFileSystem(world)).prune(1)
    save(training, 2, num_ranks=2, ranks=[0])
    assert numbers(world) == (2, [])
    pruned = opened(FaultyFileSystem(world)).prune(1)
    assert [path.name for path in pruned] == ["ckpt-0000000001"] and numbers(world) == (2, [])


def test_objects_that_a_rule_of_the_bucket_has_expired_are_not_needed(save, assert_complete):
    world = World(old_lists=0)
    for attempt, sequences in (("a", (1, 2)), ("b", (3, 4, 5))):
        store = opened(FaultyFileSystem(world), keep=2)
        store.lock().acquire()
        for sequence in sequences:
            save(store, sequence, attempt=attempt)
    for expired in ("epochs/0000000001", "epochs/0000000002", "commits/0000000002-0000000001"):
        del world.objects[f"bucket/run/{expired}"]
    following = opened(FaultyFileSystem(world), keep=2)
    following.lock().acquire()
    assert_complete(following.newest()[0], 5)
    with pytest.raises(CheckpointError, match="Another process has taken over"):
        save(store, 6, attempt="b")
    save(following, 6, attempt="c")
    assert numbers(world) == (6, [])
