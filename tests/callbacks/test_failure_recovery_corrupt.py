"""After a checkpoint was damaged, `fit` resumes from an older one and ends with the same bits."""

import logging
import shutil

import pytest
from interruptions import Interrupt, Interrupted, names
from training import differences, train

pytestmark = pytest.mark.usefixtures("cpus")


def truncate(checkpoint):
    file = checkpoint / "shared.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_bit(checkpoint):
    """Changes a weight; the file is readable and has the same size."""
    file = checkpoint / "shared.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def lose_a_shard(checkpoint):
    (checkpoint / "rank-0.safetensors").unlink()


def lose_the_manifest(checkpoint):
    (checkpoint / "manifest.json").unlink()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return train(tmp_path_factory.mktemp("undisturbed"), every_epochs=100)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interrupted")
    with pytest.raises(Interrupted):
        train(folder, callbacks=[Interrupt("on_train_batch_end", 12)], every_steps=2, background=False)
    return folder


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "shared.safetensors"),
        pytest.param(flip_a_bit, "shared.safetensors", marks=pytest.mark.long),
        pytest.param(lose_a_shard, "rank-0.safetensors", marks=pytest.mark.long),
        (lose_the_manifest, "manifest.json"),
    ],
)
def test_fit_resumes_from_an_older_checkpoint(tmp_path, interrupted, undisturbed, caplog, damage, reason):
    shutil.copytree(interrupted, tmp_path, dirs_exist_ok=True)
    older, newest = names(tmp_path)[-2:]
    damage(tmp_path / "checkpoints" / newest)
    steps = Interrupt("on_train_batch_end", 1000)
    with caplog.at_level(logging.WARNING, "tfdist"):
        result = train(tmp_path, callbacks=[steps], every_steps=2)
    said = [record.getMessage() for record in caplog.records if "skips a checkpoint" in record.getMessage()]
    assert len(said) == 1 and newest in said[0] and reason in said[0], said
    assert 1000 - steps.count == 21 - 8, f"{older} was saved after step 8"
    assert differences(undisturbed, result) == []
