"""FailureRecovery in the memory of the run: what is newer is restored, and training continues where there is none."""

import logging

import pytest
from interruptions import Interrupt, Interrupted
from small_training import STEPS, assert_same, fit

from tfdist.callbacks import FailureRecovery
from tfdist.checkpoint import CheckpointStore
from tfdist.cluster import MEMORY_VARIABLE
from tfdist.host_storage.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setenv(MEMORY_VARIABLE, str(tmp_path / "memory"))
    return tmp_path / "memory"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("undisturbed"), every_epochs=100)


def interrupted(directory, after, **recovery):
    with pytest.raises(Interrupted):
        fit(directory, Interrupt("on_train_batch_end", after), background=False, **recovery)


def steps_of_the_rest(directory, undisturbed, **recovery):
    """Trains to the end, as if nothing had happened; returns the number of steps."""
    steps = Interrupt("on_train_batch_end", 100)
    assert_same(fit(directory, steps, **recovery), undisturbed)
    return 100 - steps.count


def saved_steps(store):
    return [entry.metadata["step"] for entry in store.list_checkpoints()]


def test_the_newest_state_is_restored_wherever_it_is(tmp_path, memory, undisturbed, capsys):
    often = {"memory_every_steps": 2, "every_steps": 5}
    interrupted(tmp_path, 5, **often)  # saves 2 and 4
    (in_memory,) = memory.iterdir()
    assert saved_steps(MemoryStore(in_memory)) == [4] and saved_steps(CheckpointStore(tmp_path)) == []
    interrupted(tmp_path, 2, verbose=2, **often)  # 5 and 6
    assert "resuming in epoch 1 of 2, after step 4, from memory" in capsys.readouterr().out
    assert saved_steps(MemoryStore(in_memory)) == [4] and saved_steps(CheckpointStore(tmp_path)) == [5]
    interrupted(tmp_path, 2, verbose=2, **often)  # 6 and 7
    assert "resuming in epoch 1 of 2, after step 5\n" in capsys.readouterr().out, "what is older in memory is forgotten"
    assert saved_steps(MemoryStore(in_memory)) == [6]
    assert steps_of_the_rest(tmp_path, undisturbed, **often) == 2 * STEPS - 6
    assert not in_memory.exists(), "the training is saved"


def test_what_is_damaged_in_memory_is_skipped(tmp_path, memory, undisturbed, caplog):
    often = {"memory_every_steps": 1, "every_steps": 3}
    interrupted(tmp_path, 6, **often)
    (file,) = memory.rglob("ckpt-*/shared.safetensors")
    file.write_bytes(b"")
    with caplog.at_level(logging.WARNING, "tfdist"):
        interrupted(tmp_path, 1, **often)
    assert not list(memory.rglob("ckpt-*")), "it is of another past"
    assert steps_of_the_rest(tmp_path, undisturbed, **often) == 2 * STEPS - 3
    assert (
        "FailureRecovery skips a checkpoint in memory: ckpt-0000000004: shared.safetensors has 0 bytes" in caplog.text
    )


def test_the_disk_may_be_damaged_where_memory_has_what_is_newer(tmp_path, memory, undisturbed):
    interrupted(tmp_path, 6, memory_every_steps=1, every_steps=3)
    (file,) = tmp_path.glob("ckpt-*/shared.safetensors")
    file.write_bytes(b"")
    assert steps_of_the_rest(tmp_path, undisturbed, memory_every_steps=1, every_steps=3) == 2 * STEPS - 5


def test_training_continues_where_memory_is_full(tmp_path, memory, undisturbed, monkeypatch, caplog):
    def full(store, path, parts):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MemoryStore, "_write", full)
    with caplog.at_level(logging.WARNING, "tfdist"):
        assert_same(fit(tmp_path, memory_every_steps=4), undisturbed)
    told = [record.message for record in caplog.records if "continues without a checkpoint of step" in record.message]
    assert len(told) == 3 and "of step 4, " in told[0] and "No space left on device" in told[0]


def test_without_the_launcher_nothing_is_kept_in_memory(tmp_path, monkeypatch, undisturbed, caplog):
    monkeypatch.delenv(MEMORY_VARIABLE, raising=False)
    with caplog.at_level(logging.WARNING, "tfdist"):
        assert_same(fit(tmp_path, memory_every_steps=1), undisturbed)
    assert "Nothing is saved to the memory of the hosts. Received: memory_every_steps=1, and no memory" in caplog.text


def test_an_invalid_interval_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="memory_every_steps"):
        FailureRecovery(tmp_path, memory_every_steps=0)
