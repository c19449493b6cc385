"""A save that is due during the previous write makes the step wait, and does not change what is written."""

import threading

import keras
import pytest
from training import EPOCHS, STEPS, differences, train

from tfdist.checkpoint import BackgroundWriter, CheckpointStore

EVERY = 3
_LIMIT_SECONDS = 60
pytestmark = pytest.mark.usefixtures("cpus")


class Steps(keras.callbacks.Callback):
    is_stateless = True
    made = 0

    def on_train_batch_end(self, batch, logs=None):
        self.made += 1


def write_slowly(monkeypatch, at_end):
    """Makes each write begin when the training waits for it, and call `at_end()` at its end."""
    submit, wait = BackgroundWriter.submit, BackgroundWriter.wait

    def submit_slow(self, job):
        is_waited_for = threading.Event()

        def slow_job():
            assert is_waited_for.wait(_LIMIT_SECONDS)
            job()
            at_end()

        waited_seconds = submit(self, slow_job)
        self.is_waited_for = is_waited_for
        return waited_seconds

    def wait_for_write(self):
        if hasattr(self, "is_waited_for"):
            self.is_waited_for.set()
        wait(self)

    monkeypatch.setattr(BackgroundWriter, "submit", submit_slow)
    monkeypatch.setattr(BackgroundWriter, "wait", wait_for_write)


def contents(folder):
    """The arrays and metadata of each checkpoint."""
    store = CheckpointStore(folder / "checkpoints")
    for entry in store.list_checkpoints():
        checkpoint = store.open(entry.sequence)
        shards = checkpoint.read_shared(), checkpoint.read_rank(0)
        yield (
            {f"{index} {name}": array for index, shard in enumerate(shards) for name, array in shard.tensors.items()},
            [shard.metadata for shard in shards],
            checkpoint.metadata,
        )


def test_save_waits_for_the_previous_write(tmp_path, monkeypatch):
    often = {"every_steps": EVERY, "keep": 100, "accumulation": 2}
    keras.backend.clear_session()  # the metadata contains layer names, which are numbered
    expected = train(tmp_path / "at once", background=False, **often)
    keras.backend.clear_session()
    steps, made = Steps(), []
    write_slowly(monkeypatch, lambda: made.append(steps.made))
    result = train(tmp_path / "slow", callbacks=[steps], **often)
    assert differences(expected, result) == []
    all_steps = EPOCHS * STEPS
    # Each write lasts until the step at which the next save is due, not longer.
    assert made == [*range(2 * EVERY, all_steps + 1, EVERY), all_steps, all_steps]
    pairs = list(zip(contents(tmp_path / "at once"), contents(tmp_path / "slow"), strict=True))
    assert len(pairs) == all_steps // EVERY + 1, "one at the end"
    for (arrays, notes, metadata), (slow_arrays, slow_notes, slow_metadata) in pairs:
        assert differences(arrays, slow_arrays) == []
        assert (notes, metadata) == (slow_notes, slow_metadata)
