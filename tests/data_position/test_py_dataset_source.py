"""PyDatasets that shuffle in their hooks: the order is repeated, or a warning says that it is not."""

import collections
import copy
import random
import warnings

import numpy as np
import pytest
from data_runs import BATCH, IDS, SEED
from py_datasets import NoisyInSome, Remembering, Shuffled, noise
from recovered_runs import STEPS, Drawing, cut_off, cut_off_anywhere, each_once, run

from tfdist.data_position.py_dataset_source import PyDatasetView
from tfdist.data_position.python_randomness import states_equal

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.fixture(autouse=True)
def _strict():
    """Makes warnings outside `pytest.warns` errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


SEEDED = {
    "in place": lambda: Shuffled(np.random.shuffle),
    "in place, with noise": lambda: Shuffled(np.random.shuffle, noise=noise),
    "by Python, with noise": lambda: Shuffled(random.shuffle, noise=lambda: random.randrange(1, 9)),
    "in both hooks, with noise": lambda: Shuffled(np.random.shuffle, ("on_epoch_begin", "on_epoch_end"), noise),
    "by a generator of its own": lambda: Shuffled(np.random.default_rng(SEED).shuffle),
    "with noise in some batches": lambda: NoisyInSome(np.random.shuffle, ("__init__", "on_epoch_end")),
}


@pytest.mark.parametrize("name", SEEDED)
def test_seeded_program_resumes_in_its_order(name, tmp_path):
    whole = run(SEEDED[name], tmp_path / "whole", saves={"every_epochs": 2})
    assert each_once(whole) and whole[:STEPS] != whole[STEPS:]
    for where, seen in cut_off_anywhere(SEEDED[name], tmp_path).items():
        assert seen == whole, where


def test_program_may_be_interrupted_repeatedly(tmp_path):
    make = SEEDED["in both hooks, with noise"]
    whole = run(make, tmp_path / "whole", saves={"every_epochs": 2})
    first = run(make, tmp_path, 5, saves={"every_steps": 2})[:4]
    second = run(make, tmp_path, 5, saves={"every_steps": 2})[:4]
    assert first + second + run(make, tmp_path, saves={"every_epochs": 2}) == whole


def test_order_drawn_by_each_hook_needs_no_seed(tmp_path):
    def draw(indexes):
        indexes[:] = np.random.permutation(len(indexes))

    for moment in (2, STEPS + 2):
        saves, folder = {"every_steps": moment}, tmp_path / str(moment)
        assert each_once(cut_off(lambda: Shuffled(draw, noise=noise), folder, moment, seed=None, saves=saves))


def test_draws_of_others_are_not_repeated(tmp_path):
    def make():
        return Shuffled(np.random.shuffle, ("on_epoch_begin", "on_epoch_end"))

    whole, begun, rest = Drawing(), Drawing(), Drawing()
    run(make, tmp_path / "whole", callbacks=[whole], saves={"every_epochs": 2})
    run(make, tmp_path / "cut", 3, callbacks=[begun], saves={"every_steps": 2})
    run(make, tmp_path / "cut", callbacks=[rest], saves={"every_epochs": 2})
    assert begun.drawn[:2] + rest.drawn == whole.drawn


UNSEEDED = {
    "in place": (lambda: Shuffled(np.random.shuffle), "its attribute 'indexes' differs"),
    "when it is made": (lambda: Shuffled(np.random.shuffle, ("__init__",)), "its attribute 'indexes' differs"),
    "a generator of its own": (lambda: Shuffled(np.random.default_rng().shuffle), "its attribute 'indexes' differs"),
    "out of sight": (lambda: Hidden(np.random.shuffle), "its hooks draw from the generator of numpy"),
}


class Hidden(Shuffled):
    """Keeps its order in an attribute that is not inspected."""

    def __init__(self, *arguments):
        super().__init__(*arguments, hooks=())
        self.indexes = collections.UserList(range(len(IDS)))

    def __getitem__(self, index):
        return (IDS[list(self.indexes[index * BATCH : (index + 1) * BATCH])],)

    def on_epoch_end(self):
        self._shuffle(self.indexes)


@pytest.mark.parametrize("name", UNSEEDED)
@pytest.mark.parametrize("moment", [STEPS, STEPS + 2])
def test_unrepeatable_order_is_a_warning(name, moment, tmp_path):
    make, why = UNSEEDED[name]
    kind = type(make()).__name__
    with pytest.warns(RuntimeWarning, match=f"of a {kind} come in another order.*{why}.*Give {kind} .*`get_state`"):
        cut_off(make, tmp_path, moment, seed=None, saves={"every_steps": moment})


@pytest.mark.parametrize("hooks", [("__init__", "on_epoch_end"), ("on_epoch_begin",)])
def test_get_state_is_saved_and_restored(hooks, tmp_path):
    whole = run(lambda: Remembering(SEED, hooks=hooks), tmp_path / "whole", saves={"every_epochs": 2})
    made = []

    def make_again():
        made.append(Remembering(SEED + 1, hooks=hooks))
        return made[-1]

    for where, seen in cut_off_anywhere(lambda: Remembering(SEED, hooks=hooks), tmp_path, make_again).items():
        assert seen == whole, where
    # Creation; the hook that Keras calls before training; two hooks per remaining epoch.
    assert [data.calls for data in made] == [2 + 2 * epochs for epochs in (2, 1, 1)], "not called again"


def test_threads_use_the_state_at_the_beginning_of_the_epoch():
    data = Remembering(SEED, workers=2)
    view = PyDatasetView(data, shuffle=False)
    view.track_position()
    view.on_epoch_begin()
    state = copy.deepcopy(data.get_state())
    view.begin_pass()
    assert view[0] is not None and not states_equal(data.get_state(), state)
    assert states_equal(view.order(1)["own"], state)
    assert states_equal(view.order(None)["own"], data.get_state())


def test_state_without_set_state_is_rejected(tmp_path):
    run(lambda: Remembering(SEED), tmp_path, 3)
    with pytest.raises(ValueError, match="Received: Shuffled without these methods. Expected: `get_state"):
        run(lambda: Shuffled(np.random.shuffle), tmp_path)
