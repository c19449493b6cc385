"""Saves of Keras go beside the path, and to it when they are complete."""

import io
import os
import time

import keras
import numpy as np
import pytest
from replaced_paths import recording_patch

from tfdist.keras_internals import saved_files
from tfdist.keras_internals.saved_files import patch_saved_files

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.fixture
def patch(unpatched):
    """Patches this process until the end of the test; returns the list of the paths that are then replaced."""
    return recording_patch(patch_saved_files)


@pytest.fixture
def model():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])


def difference(model, other):
    return max(float(np.abs(a - b).max()) for a, b in zip(model.get_weights(), other.get_weights(), strict=True))


SAVES = {
    "model.keras": lambda model, path: model.save(path),
    "model.h5": lambda model, path: model.save(path),
    "unzipped": lambda model, path: model.save(path, zipped=False),
    "model.weights.h5": lambda model, path: model.save_weights(path),
    "parts.weights.json": lambda model, path: model.save_weights(path, max_shard_size=1e-5),
}


@pytest.mark.parametrize("name", SAVES)
def test_each_way_to_save_replaces_the_path(patch, model, tmp_path, name):
    replaced = patch()
    for _ in range(2):
        assert SAVES[name](model, tmp_path / name) is None
    assert replaced == [str(tmp_path / name)] * 2
    loaded = keras.models.clone_model(model)
    if "weights" in name:
        loaded.load_weights(tmp_path / name)
    else:
        loaded = keras.models.load_model(tmp_path / name)
    assert difference(model, loaded) == 0.0


@pytest.mark.parametrize("name", ["model.h5", "unzipped"])
def test_what_creates_its_directory_does_so(patch, model, tmp_path, name):
    replaced = patch()
    SAVES[name](model, tmp_path / "new" / name)
    assert replaced == [str(tmp_path / "new" / name)]
    assert (tmp_path / "new" / name).exists()


def test_a_missing_directory_is_the_error_of_keras(patch, model, tmp_path):
    patch()
    with pytest.raises(FileNotFoundError, match=r"missing/model\.keras"):
        model.save(tmp_path / "missing" / "model.keras")
    assert list(tmp_path.iterdir()) == []


def test_a_link_stays_one(patch, model, tmp_path):
    patch()
    (tmp_path / "disk").mkdir()
    (tmp_path / "best.keras").symlink_to(tmp_path / "disk" / "model.keras")
    model.save(tmp_path / "best.keras")
    assert (tmp_path / "best.keras").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["model.keras"]


@pytest.mark.parametrize("target", ["gs://bucket/model.h5", io.BytesIO()])
def test_what_is_no_path_is_left_to_keras(patch, monkeypatch, tmp_path, target):
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr(saved_files._hdf5, "save_model_to_hdf5", lambda model, target: seen.append(target))
    replaced = patch()
    saved_files._hdf5.save_model_to_hdf5(None, target)
    assert seen == [target] and replaced == []
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_another_worker_has_just_created(patch, tmp_path):
    patch()
    saved_files._files.makedirs(str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        saved_files._files.makedirs(str(tmp_path / "file"))


def test_keras_asks_about_files_of_before_the_run_and_of_this_worker(patch, model, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(saved_files._prompts, "ask_to_proceed_with_overwrite", asked.append)
    patch()
    old, other, own = (str(tmp_path / f"{name}.keras") for name in ("old", "other", "own"))
    model.save(own)
    for path, seconds in ((old, -60), (other, 60), (own, 60)):
        with open(path, "ab"):
            os.utime(path, (time.time() + seconds,) * 2)
        model.save(path, overwrite=False)
    assert asked == [old, own]
    assert [os.path.getsize(path) > 0 for path in (old, other)] == [False, True]
