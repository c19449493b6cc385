"""The canaries find what a newer TensorFlow or Keras might do otherwise; only an untested version runs them."""

import inspect

import keras
import pytest

from tfdist.keras_internals import epoch_iterator, losses
from tfdist.private_symbols import MissingPrivateSymbolError
from tfdist.strategies import MirroredStrategy, version_canaries
from tfdist.strategies.version_canaries import IncompatibleVersionError, canary_failures, check_installed_versions
from tfdist.versions import UntestedVersionWarning


def test_the_installed_versions_pass(cpus):
    assert canary_failures(cpus[:2]) == []


def test_updates_that_are_counted_elsewhere_are_found(cpus, monkeypatch):
    stock = keras.optimizers.SGD.update_step

    def count_too(self, gradient, variable, learning_rate):
        self._iterations.assign_add(1)
        return stock(self, gradient, variable, learning_rate)

    monkeypatch.setattr(keras.optimizers.SGD, "update_step", count_too)
    (failure, *_) = canary_failures(cpus[:2])
    assert failure.startswith("optimizer.iterations are ") and failure.endswith(" instead of 4")


def test_steps_that_are_numbered_otherwise_are_found(cpus, monkeypatch):
    last_step = version_canaries.last_step
    monkeypatch.setattr(version_canaries, "last_step", lambda model, batch: last_step(model, batch) - 1)
    assert canary_failures(cpus[:2]) == ["the last steps that callbacks get are [0, 2] instead of [1, 3]"]


def test_a_loss_that_bypasses_the_replaced_function_is_found(cpus, monkeypatch):
    MirroredStrategy(cpus[:2])  # replaces it
    monkeypatch.setattr(losses.losses, "reduce_weighted_values", inspect.unwrap(losses.losses.reduce_weighted_values))
    (failure,) = canary_failures(cpus[:2])
    assert failure.startswith("a masked loss is ")


def test_an_update_that_is_made_twice_is_found(cpus, monkeypatch):
    stock = keras.optimizers.SGD.apply

    def twice(self, *args, **kwargs):
        stock(self, *args, **kwargs)
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(keras.optimizers.SGD, "apply", twice)
    assert "the collectives of gradients in 4 updates are (8, 8) instead of (4, 4)" in canary_failures(cpus[:2])


def test_a_function_imported_by_name_is_replaced_too(unpatched, monkeypatch):
    import keras.src.losses.losses as importing

    original = losses.losses.reduce_values
    monkeypatch.setattr(importing, "reduce_values", original, raising=False)
    losses.patch_losses()
    assert importing.reduce_values is losses.losses.reduce_values is not original


@pytest.mark.parametrize(("has_last_step", "step"), [(True, 5), (False, 8)])
def test_a_step_number_is_the_last_of_its_execution(has_last_step, step, monkeypatch):
    monkeypatch.setattr(epoch_iterator, "_has_last_step", has_last_step)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(steps_per_execution=4)
    assert epoch_iterator.last_step(model, 5) == step


@pytest.fixture
def untested(monkeypatch):
    """`untested(program)`: an untested version, and what the canaries are."""

    def replace(program, names=("keras",)):
        monkeypatch.setattr(version_canaries, "check_versions", lambda stacklevel: list(names))
        monkeypatch.setattr(version_canaries, "_PROGRAM", program)

    version_canaries._check_once.cache_clear()
    yield replace
    version_canaries._check_once.cache_clear()


FAILS = "print('a loss is 1 instead of 2'); raise SystemExit(1)"


def test_a_canary_that_fails_is_an_error(untested):
    untested(FAILS)
    for _ in range(2):  # not only at the first attempt
        with pytest.raises(IncompatibleVersionError, match=r"Received: .*keras .*with which a loss is 1 instead of 2"):
            MirroredStrategy(["CPU:0"])


def test_a_crash_of_the_child_is_an_error(untested):
    untested("import no_such_module")
    with pytest.raises(IncompatibleVersionError, match="ModuleNotFoundError: No module named 'no_such_module'"):
        check_installed_versions(is_chief=True)


def test_only_the_chief_with_an_untested_version_runs_them(untested):
    untested(FAILS)
    check_installed_versions(is_chief=False)
    untested(FAILS, names=())
    check_installed_versions(is_chief=True)


def test_a_child_that_does_not_end_is_a_warning(untested, monkeypatch):
    untested("import time; time.sleep(600)")
    monkeypatch.setattr(version_canaries, "_TIMEOUT_SECONDS", 0.5)
    with pytest.warns(UntestedVersionWarning, match="could not check these versions: .*timed out"):
        check_installed_versions(is_chief=True)


def test_the_child_gets_no_cluster(untested, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{}")
    untested("import os, sys; import tfdist; sys.exit('TF_CONFIG' in os.environ)")
    check_installed_versions(is_chief=True)


def test_a_missing_attribute_is_an_error_that_names_it(untested):
    untested(
        "import keras\n"
        "compile = keras.Model.compile\n"
        "def compile_without(self, *args, **kwargs):\n"
        "    compile(self, *args, **kwargs)\n"
        "    del self._compile_loss\n"
        "keras.Model.compile = compile_without\n"
        f"{version_canaries._PROGRAM}"
    )
    with pytest.raises(MissingPrivateSymbolError, match=r"needs 'keras:Model\(\)\._compile_loss' .* Expected: a keras"):
        MirroredStrategy(["CPU:0"])


@pytest.mark.long  # by default a child fails by a missing attribute only, and this process passes
def test_the_child_passes_with_the_installed_versions(untested):
    untested(version_canaries._PROGRAM)
    check_installed_versions(is_chief=True)
