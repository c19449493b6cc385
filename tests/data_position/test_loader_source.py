"""Datasets of Grain and torchdata's loader as data of `fit`: positions by their own state.

What PyTorch and torchdata do is done by a stand-in; `test_with_torchdata` uses the real ones.
"""

import contextlib
import gc
import json
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
import torchdata_stand_in
from counted_samples import READ, Samples
from data_runs import BATCH, IDS, SEED, assert_resumes
from loader_cases import GRAIN, GRAIN_WITH_PROCESSES, TORCH, data_loader, shuffled, stateful, torch_case, unthreaded
from optional_packages import require
from recovered_runs import STEPS, cut_off, cut_off_anywhere, run

from tfdist.data_position.loader_source import LoaderSource
from tfdist.data_position.stateful_loaders import decode_state, encode_state
from tfdist.keras_internals.loader_adapters import loader_adapter
from tfdist.recovery import LoopRecovery
from tfdist.strategies import ElasticLoop, MirroredStrategy

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.fixture(autouse=True)
def _quiet(recwarn):
    """Ignores Keras' warnings about `shuffle=True` and data that ends."""
    yield


@pytest.fixture
def grain():
    require("grain")
    import grain

    return grain


@pytest.fixture
def torchdata(monkeypatch):
    return torchdata_stand_in.install(monkeypatch)


@pytest.fixture
def real_torchdata():
    require("torch", "torchdata")
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    return torch, StatefulDataLoader


def mostly_long(cases, *default):
    return [case if case in default else pytest.param(case, marks=pytest.mark.long) for case in cases]


@pytest.mark.parametrize("case", mostly_long(GRAIN, "DataLoader", "IterDataset repeated over epochs"))
def test_grain_resumes_at_any_step(case, grain):
    assert_resumes(lambda _: GRAIN[case](grain), tf.distribute.get_strategy(), at_many_steps=True)


@pytest.mark.parametrize("case", mostly_long(TORCH, "shuffled"))
def test_a_stateful_data_loader_resumes_at_any_step(case, torchdata):
    assert_resumes(lambda _: torch_case(case, torchdata), tf.distribute.get_strategy(), at_many_steps=True)


@pytest.mark.parametrize("case", mostly_long(TORCH, "over epochs"))
def test_a_loader_resumes_under_a_strategy(case, torchdata, cpus):
    assert_resumes(lambda _: torch_case(case, torchdata), MirroredStrategy(cpus[:2]), at_many_steps=False)


def reads_of_resumed_run(make, folder, after):
    """Interrupts a training after `after` saved steps. Returns how many samples the resumed run has read."""
    run(make, folder, after + 1)
    READ.clear()
    run(make, folder)
    return len(READ)


@pytest.mark.parametrize("after", mostly_long([2, STEPS, STEPS + 2], 2))
def test_no_batch_is_read_again(after, grain, torchdata, tmp_path):
    """Besides the first two, of which Keras reads the shapes."""
    expected = 2 * BATCH + sum(len(IDS) - done * BATCH for done in {2: (2, 0), STEPS: (0,), STEPS + 2: (2,)}[after])
    makes = {
        "DataLoader": lambda: data_loader(grain),
        "IterDataset": lambda: shuffled(grain).to_iter_dataset(unthreaded(grain)).batch(BATCH),
        "torch": lambda: stateful(torchdata),
    }
    for name, make in makes.items():
        assert reads_of_resumed_run(make, tmp_path / name, after) == expected, name


def cut_off_loop(make, folder, stop=None, **saves):
    """Returns the numbers and batches of the steps of a loop over `make()`, which stops within step `stop`."""
    keras.utils.set_random_seed(SEED)
    data, seen = make(), []
    with contextlib.suppress(InterruptedError):
        given = {"state": {"a": tf.Variable(0)}, "verbose": False, "handle_signals": False, **saves}
        with LoopRecovery(folder, **given) as recovery:
            for _ in recovery.epochs(3):
                for step, batch in recovery.steps(data):
                    assert all(isinstance(part, tf.Tensor) for part in keras.tree.flatten(batch))
                    seen.append((step, keras.tree.map_structure(lambda part: part.numpy().tolist(), batch)))
                    if step == stop:
                        raise InterruptedError
    gc.collect()  # ends the thread that reads ahead
    return seen


def assert_loop_resumes(make, folder, **saves):
    whole, stop = cut_off_loop(make, folder / "whole"), STEPS + 2  # within the second epoch, which a third follows
    assert len(whole) == 3 * STEPS
    cut_off_loop(make, folder / "other", stop, **saves)
    resumed = cut_off_loop(make, folder / "other", **saves)
    assert resumed == whole[stop if "every_steps" in saves else STEPS :]


def test_a_loop_over_grain_resumes(grain, tmp_path):
    assert_loop_resumes(lambda: shuffled(grain).batch(BATCH), tmp_path, every_steps=1)


@pytest.mark.parametrize("saves", [{"every_steps": 1}, {"every_epochs": 1}])
def test_a_loop_over_a_stateful_data_loader_resumes(saves, torchdata, tmp_path):
    """Also between two epochs, where the shapes of its batches are read again, which draws noise."""
    assert_loop_resumes(lambda: stateful(torchdata, noisy(torchdata[0])), tmp_path, **saves)


@pytest.mark.parametrize(
    "collate", [pytest.param(lambda parts: parts[0], marks=pytest.mark.long), lambda parts: {"id": parts[0]}]
)
def test_a_loop_over_batches_that_are_no_tuples_resumes(collate, torchdata, tmp_path, monkeypatch):
    stock = torchdata_stand_in._Iterator.__next__
    monkeypatch.setattr(torchdata_stand_in._Iterator, "__next__", lambda self: collate(stock(self)))
    assert_loop_resumes(lambda: stateful(torchdata), tmp_path, every_steps=1)


def test_two_passes_at_once_over_a_loader_are_an_error(torchdata):
    """The inner one would end the outer one."""
    data, steps = stateful(torchdata), []
    loop = ElasticLoop(tf.distribute.get_strategy(), [])
    with pytest.raises(ValueError, match="Received: a StatefulDataLoader, within a pass over it"):
        for _ in loop.batches(data):
            steps.append(len(list(loop.batches(stateful(torchdata)))))
            for _ in loop.batches(data):
                pass
    assert steps == [STEPS] and len(list(loop.batches(data))) == STEPS


def noisy(torch):
    """Samples with noise from all global generators, in hundreds."""

    def of_sample(number):
        noise = np.random.randint(1, 4) + random.randrange(1, 4) + int(torch.randint(1, 4, (1,))[0])
        return (torch.tensor(int(number + 100 * noise)),)

    return of_sample


def test_random_numbers_between_epochs_are_drawn_as_before(torchdata, tmp_path):
    """Also by a validation, whose iterator draws a seed."""
    make, validation = lambda: stateful(torchdata, noisy(torchdata[0])), stateful(torchdata, has_generator=False)
    whole = run(make, tmp_path / "whole", saves={"every_epochs": 2}, validation_data=validation)
    assert len({number // 100 for step in whole for number in step}) > 3
    assert cut_off(make, tmp_path / "cut", STEPS, saves={"every_epochs": 1}, validation_data=validation) == whole


@pytest.mark.long
def test_random_numbers_of_samples_that_are_read_ahead_are_drawn_as_before(torchdata, tmp_path, cpus):
    def make():
        return stateful(torchdata, noisy(torchdata[0]))

    with MirroredStrategy(cpus[:2]).scope():
        whole = run(make, tmp_path / "whole", saves={"every_epochs": 2})
        for where, seen in cut_off_anywhere(make, tmp_path).items():
            assert seen == whole, where


def test_a_pass_that_is_left_reads_no_more(torchdata):
    data = stateful(torchdata)
    adapter = loader_adapter(data)
    source = LoaderSource.of_adapter(adapter, data)
    source.dataset = adapter.get_tf_dataset()
    built = source.iterator()  # as Keras does to build a model
    next(built)
    source.track_position(None)
    assert list(built) == [] and source.order(None)["own"] is None
    first = source.iterator()
    next(first)
    second = source.iterator()
    assert list(first) == [] and len(list(second)) == STEPS


def test_states_are_copied_exactly(torchdata):
    state = {"counts": [1, (2.5, None)], 0: b"\x00\xff", "tensor": torchdata[0].tensor([1, 2]), "array": np.arange(2)}
    encoded = encode_state(state)
    state["counts"].append(3)
    state["array"][:] = 9
    decoded = decode_state(json.loads(json.dumps(encoded, default=lambda array: array.tolist())) and encoded)
    assert decoded["counts"] == [1, (2.5, None)] and decoded[0] == b"\x00\xff"
    assert type(decoded["tensor"]) is type(state["tensor"]) and decoded["array"].tolist() == [0, 1]


def test_a_loader_that_validates_as_well(torchdata, tmp_path):
    """It knows the newest of its iterators, which is that of a validation."""

    def fit(folder, fail_after=None):
        data = stateful(torchdata, shuffle=False)
        return run(lambda: data, folder, fail_after, epochs=3, steps_per_epoch=4, validation_data=data)

    whole = fit(tmp_path / "whole")
    assert fit(tmp_path, 6)[:5] + fit(tmp_path) == whole


def test_a_state_that_cannot_be_saved_is_an_error(torchdata, tmp_path):
    def make():
        data = stateful(torchdata)
        data.dataset.state_dict = lambda: {"seen": {1, 2}}
        return data

    with pytest.raises(ValueError, match=r"position of a StatefulDataLoader cannot be saved\. Received: .*of type set"):
        run(make, tmp_path)


def test_a_state_that_is_refused_is_an_error(grain, tmp_path):
    run(lambda: data_loader(grain), tmp_path, 3)
    with pytest.raises(ValueError, match="Grain dataset cannot continue from the position.*Received: .*Sampler"):
        run(lambda: data_loader(grain, seed=4), tmp_path)


def test_a_loader_without_a_state_is_drawn_again_or_an_error(torchdata, tmp_path):
    torch, _ = torchdata

    def make():
        return torch.utils.data.DataLoader(Samples(IDS, lambda number: (torch.tensor(int(number)),)), batch_size=BATCH)

    run(make, tmp_path, 3)
    with pytest.raises(RuntimeError, match="its data is a DataLoader of PyTorch, which cannot be resumed"):
        run(make, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
@pytest.mark.parametrize("case", TORCH)
def test_with_torchdata(case, options, real_torchdata):
    def make(_):
        return torch_case(case, real_torchdata, **options)

    assert_resumes(make, tf.distribute.get_strategy(), at_many_steps=True)


@pytest.mark.long
def test_grain_with_processes(grain):
    """Processes of Grain import the main module, here that of pytest."""
    for make in GRAIN_WITH_PROCESSES.values():
        assert_resumes(lambda _, make=make: make(grain), tf.distribute.get_strategy(), at_many_steps=False)
