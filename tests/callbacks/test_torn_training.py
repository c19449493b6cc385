"""Checkpoints of a training that are torn: `fit` goes on from an older one, and ends as if nothing had happened."""

import logging

import pytest
from interruptions import Interrupt, Interrupted, names
from training import differences, train

pytestmark = pytest.mark.usefixtures("cpus")


def truncate(checkpoint):
    file = checkpoint / "shared.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_bit(checkpoint):
    """Of a weight: the file can be read, and is as long as it was."""
    file = checkpoint / "shared.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def lose_a_part(checkpoint):
    (checkpoint / "rank-0.safetensors").unlink()


def lose_the_manifest(checkpoint):
    (checkpoint / "manifest.json").unlink()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return train(tmp_path_factory.mktemp("undisturbed"), every_epochs=100)


@pytest.mark.parametrize(
    ("tear", "why"),
    [
        (truncate, "shared.safetensors"),
        (flip_a_bit, "shared.safetensors"),
        (lose_a_part, "rank-0.safetensors"),
        (lose_the_manifest, "manifest.json"),
    ],
)
def test_an_older_checkpoint_is_gone_on_from(tmp_path, undisturbed, caplog, tear, why):
    with pytest.raises(Interrupted):
        train(tmp_path, callbacks=[Interrupt("on_train_batch_end", 12)], every_steps=2, background=False)
    older, newest = names(tmp_path)[-2:]
    tear(tmp_path / "checkpoints" / newest)
    steps = Interrupt("on_train_batch_end", 1000)
    with caplog.at_level(logging.WARNING, "tfdist"):
        result = train(tmp_path, callbacks=[steps], every_steps=2)
    said = [record.getMessage() for record in caplog.records if "passes over" in record.getMessage()]
    assert len(said) == 1 and newest in said[0] and why in said[0], said
    assert 1000 - steps.count == 21 - 8, f"{older} was saved after step 8"
    assert differences(undisturbed, result) == []
