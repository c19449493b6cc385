"""Two checkpoints with one number, as after a restart from an older one: the complete one is opened."""

from simulated_objects import FaultyFileSystem, World, objects_of

from tfdist.checkpoint.remote.remote_store import RemoteStore


def test_the_damaged_one_of_two_is_passed(save, assert_complete):
    objects = objects_of(FaultyFileSystem(World()))

    def store():
        return RemoteStore("simulated://run", objects=objects, beat_seconds=0)

    save(store(), 2, attempt="a")
    save(store(), 2, attempt="b")
    key = "parts/0000000002-b/shared.safetensors.00000"
    objects.put(key, objects.get(key)[:-1] + b"?")
    newest, skipped = store().newest()
    assert len(skipped) == 1 and "shared.safetensors is not what was written" in skipped[0]
    assert_complete(newest, 2)
    assert_complete(store().open(2), 2)
