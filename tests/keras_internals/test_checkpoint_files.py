"""Checkpoints and SavedModels go beside the path, and to it when they are complete."""

import pytest
import tensorflow as tf
from replaced_paths import recording_patch

from tfdist.keras_internals import saved_files
from tfdist.keras_internals.saved_files import patch_checkpoint_files

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.fixture
def patch(unpatched):
    """Patches this process until the end of the test; returns the list of the paths that are then replaced."""
    return recording_patch(patch_checkpoint_files)


def module(value=2.0):
    module = tf.Module()
    module.value = tf.Variable(value)
    return module


def test_checkpoints_replace_their_files_and_return_their_path(patch, tmp_path):
    replaced = patch()
    checkpoint = tf.train.Checkpoint(module=module())
    prefix = tmp_path / "new" / "state"
    manager = tf.train.CheckpointManager(checkpoint, str(tmp_path / "managed"), max_to_keep=1)
    returned = [checkpoint.write(prefix), checkpoint.save(prefix), manager.save()]
    assert returned == [str(prefix), f"{prefix}-1", str(tmp_path / "managed" / "ckpt-2")]
    assert replaced == returned
    for path in returned:
        other = module(0.0)
        tf.train.Checkpoint(module=other).restore(path).expect_partial()
        assert other.value.numpy() == 2.0


def test_a_relative_prefix(patch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    replaced = patch()
    assert tf.train.Checkpoint(module=module()).write("state") == "state"
    assert replaced == ["state"]
    assert (tmp_path / "state.index").exists()


def test_what_a_graph_writes_and_addresses_are_left_to_tensorflow(patch, tmp_path, monkeypatch):
    checkpoint = tf.train.Checkpoint(module=module())
    replaced = patch()
    tf.function(lambda: checkpoint.write(str(tmp_path / "state")))()
    assert (tmp_path / "state.index").exists()
    with pytest.raises(tf.errors.OpError, match="unknown"):
        checkpoint.write("unknown://bucket/state")
    with pytest.raises(tf.errors.OpError, match="unknown"):
        tf.saved_model.save(module(), "unknown://bucket/exported")
    assert replaced == []


def test_saved_models_replace_their_files(patch, tmp_path):
    replaced = patch()
    path = tmp_path / "new" / "exported"
    for value in (1.0, 2.0):
        tf.saved_model.save(module(value), path)
    assert replaced.count(str(path)) == 2  # besides those of its variables, within
    assert tf.saved_model.load(path).value.numpy() == 2.0
    assert [each.name for each in path.parent.iterdir()] == ["exported"]


def test_variables_are_exported_in_the_order_of_their_creation(patch, monkeypatch, tmp_path):
    """Keras lists them by way of a set, so in another order in each process."""
    exported = []
    monkeypatch.setattr(saved_files._saved_model, "save_and_return_nodes", lambda obj, _: exported.append(obj))
    patch()
    variables = [tf.Variable(float(number)) for number in range(12)]  # names with one digit, and with two
    archive = tf.Module()
    archive._all_variables = variables[::-1]
    saved_files._saved_model.save_and_return_nodes(archive, str(tmp_path / "exported"))
    (archive,) = exported
    assert [float(variable) for variable in archive._all_variables] == list(range(12))
