"""PyDatasets that shuffle in their hooks, as most do: the order comes back, or a warning says that it does not."""

import collections
import copy
import random
import warnings

import keras
import numpy as np
import pytest
from data_runs import BATCH, IDS, SEED
from recovered_runs import STEPS, Drawing, cut_off, cut_off_anywhere, each_once, run

from tfdist.keras_internals import py_dataset_hooks
from tfdist.keras_internals.attribute_orders import attribute_orders
from tfdist.keras_internals.py_dataset_view import PyDatasetView
from tfdist.keras_internals.random_states import packed, same, set_global_states, unpacked
from tfdist.keras_internals.read_ahead import ReadAhead

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.fixture(autouse=True)
def _strict():
    """Only what `pytest.warns` expects may be warned of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


class Shuffled(keras.utils.PyDataset):
    """The ids, shuffled by `shuffle(indexes)` in the given hooks; with noise in hundreds."""

    def __init__(self, shuffle, hooks=("__init__", "on_epoch_end"), noise=None, **arguments):
        super().__init__(**arguments)
        self.indexes, self._shuffle, self._hooks, self._noise = np.arange(len(IDS)), shuffle, hooks, noise
        self._call("__init__")

    def _call(self, hook):
        if hook in self._hooks:
            self._shuffle(self.indexes)

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        ids = IDS[self.indexes[index * BATCH : (index + 1) * BATCH]]
        return (ids if self._noise is None else ids + 100 * self._noise(),)

    def on_epoch_begin(self):
        self._call("on_epoch_begin")

    def on_epoch_end(self):
        self._call("on_epoch_end")


def noise():
    return np.random.randint(1, 9)


class NoisyInSome(Shuffled):
    """Draws in the batches behind the third alone."""

    def __getitem__(self, index):
        (ids,) = super().__getitem__(index)
        return (ids + 100 * noise() if index > 2 else ids,)


SEEDED = {
    "in place": lambda: Shuffled(np.random.shuffle),
    "in place, with noise": lambda: Shuffled(np.random.shuffle, noise=noise),
    "by Python, with noise": lambda: Shuffled(random.shuffle, noise=lambda: random.randrange(1, 9)),
    "in both hooks, with noise": lambda: Shuffled(np.random.shuffle, ("on_epoch_begin", "on_epoch_end"), noise),
    "by a generator of its own": lambda: Shuffled(np.random.default_rng(SEED).shuffle),
    "with noise in some batches": lambda: NoisyInSome(np.random.shuffle, ("__init__", "on_epoch_end")),
}


@pytest.mark.parametrize("name", SEEDED)
def test_a_seeded_program_goes_on_in_its_order(name, tmp_path):
    whole = run(SEEDED[name], tmp_path / "whole", saves={"every_epochs": 2})
    assert each_once(whole) and whole[:STEPS] != whole[STEPS:]
    for where, seen in cut_off_anywhere(SEEDED[name], tmp_path).items():
        assert seen == whole, where


def test_a_program_may_be_cut_off_again_and_again(tmp_path):
    make = SEEDED["in both hooks, with noise"]
    whole = run(make, tmp_path / "whole", saves={"every_epochs": 2})
    first = run(make, tmp_path, 5, saves={"every_steps": 2})[:4]
    second = run(make, tmp_path, 5, saves={"every_steps": 2})[:4]
    assert first + second + run(make, tmp_path, saves={"every_epochs": 2}) == whole


def test_an_order_drawn_anew_by_each_hook_needs_no_seed(tmp_path):
    def draw(indexes):
        indexes[:] = np.random.permutation(len(indexes))

    for moment in (2, STEPS + 2):
        saves, folder = {"every_steps": moment}, tmp_path / str(moment)
        assert each_once(cut_off(lambda: Shuffled(draw, noise=noise), folder, moment, seed=None, saves=saves))


def test_what_others_draw_is_not_drawn_again(tmp_path):
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
    """Keeps its order where nobody looks."""

    def __init__(self, *arguments):
        super().__init__(*arguments, hooks=())
        self.indexes = collections.UserList(range(len(IDS)))

    def __getitem__(self, index):
        return (IDS[list(self.indexes[index * BATCH : (index + 1) * BATCH])],)

    def on_epoch_end(self):
        self._shuffle(self.indexes)


@pytest.mark.parametrize("name", UNSEEDED)
@pytest.mark.parametrize("moment", [STEPS, STEPS + 2])
def test_an_order_that_cannot_be_had_again_is_warned_of(name, moment, tmp_path):
    make, why = UNSEEDED[name]
    kind = type(make()).__name__
    with pytest.warns(RuntimeWarning, match=f"of a {kind} come in another order.*{why}.*Give {kind} .*`get_state`"):
        cut_off(make, tmp_path, moment, seed=None, saves={"every_steps": moment})


class Remembering(Shuffled):
    """Tells of its state: its order and its generator, from which it draws noise, too."""

    def __init__(self, seed, **arguments):
        self.generator, self.calls = np.random.default_rng(seed), 0
        super().__init__(self.generator.shuffle, noise=lambda: self.generator.integers(1, 9), **arguments)

    def _call(self, hook):
        super()._call(hook)
        self.calls += 1

    def get_state(self):
        return {"indexes": self.indexes, "generator": self.generator.bit_generator.state}

    def set_state(self, state):
        self.indexes[:], self.generator.bit_generator.state = state["indexes"], state["generator"]


@pytest.mark.parametrize("hooks", [("__init__", "on_epoch_end"), ("on_epoch_begin",)])
def test_a_state_of_its_own_is_saved_and_put_back(hooks, tmp_path):
    whole = run(lambda: Remembering(SEED, hooks=hooks), tmp_path / "whole", saves={"every_epochs": 2})
    made = []

    def make_again():
        made.append(Remembering(SEED + 1, hooks=hooks))
        return made[-1]

    for where, seen in cut_off_anywhere(lambda: Remembering(SEED, hooks=hooks), tmp_path, make_again).items():
        assert seen == whole, where
    # Made; the hook before training, which Keras calls; two hooks an epoch that is left or goes on.
    assert [data.calls for data in made] == [2 + 2 * epochs for epochs in (2, 1, 1)], "not called again"


def test_threads_read_by_the_state_at_the_beginning_of_the_epoch():
    data = Remembering(SEED, workers=2)
    view = PyDatasetView(data, shuffle=False)
    view.follow()
    view.on_epoch_begin()
    state = copy.deepcopy(data.get_state())
    view.begin_pass()
    assert view[0] is not None and not same(data.get_state(), state)
    assert same(view.order(1)["own"], state)
    assert same(view.order(None)["own"], data.get_state())


def test_a_state_that_nothing_takes_is_refused(tmp_path):
    run(lambda: Remembering(SEED), tmp_path, 3)
    with pytest.raises(ValueError, match="Received: Shuffled without these methods. Expected: `get_state"):
        run(lambda: Shuffled(np.random.shuffle), tmp_path)


def view_of(data):
    """A view that is followed, at the beginning of a pass."""
    view = PyDatasetView(data, shuffle=False)
    view.follow()
    view.on_epoch_begin()
    view.begin_pass()
    return view


def test_batches_that_draw_now_and_then_are_read_the_same_again():
    view = view_of(NoisyInSome(np.random.shuffle, ()))
    read = [view[number][0].tolist() for number in range(STEPS)]
    for drawn in (2, 4):  # all of them were read ahead
        before = view.order(drawn)["before"]
        assert list(before) == ["numpy"]
        set_global_states({"numpy": unpacked(before["numpy"])})
        assert [view._read(number)[0].tolist() for number in range(drawn, STEPS)] == read[drawn:]


def test_a_generator_that_others_draw_from_is_theirs_where_the_data_draws_nothing():
    ahead, states = ReadAhead(), [np.random.default_rng(seed).bit_generator.state for seed in range(4)]
    for number, (before, after) in enumerate([(0, 0), (1, 1), (1, 2)]):  # the last: drawn by others while it was read
        ahead.note(number, {"numpy": states[before]}, {"numpy": states[after]})
    assert ahead.before(1) == {}


def test_states_are_kept_of_batches_to_come_and_only_what_changed():
    data = Remembering(SEED)
    view = view_of(data)
    for number in range(STEPS):
        assert view[number] is not None
    order, kept = view.order(2), [state for _, _, state in view._ahead._entries]
    assert order["before"] == {} and len(view._ahead) == STEPS - 2
    assert all(state["indexes"] is kept[0]["indexes"] for state in kept), "one copy of what stays"
    assert same(order["own"], kept[0]) and not same(kept[0], kept[1])
    ahead = ReadAhead()
    for number in range(5000):
        ahead.note(number, {"own": number}, {"own": number + 1})
    assert len(ahead) < 1000 and ahead.before(4990) == {"own": 4990}


def test_draws_are_kept_as_text_and_their_end_is_warned_of(monkeypatch):
    monkeypatch.setattr(py_dataset_hooks, "_MOST_STATES", 3)
    hooks = py_dataset_hooks.PyDatasetHooks(Shuffled(lambda ids: (np.random.shuffle(ids), random.random())))
    hooks.follow()
    states = []
    for _ in range(2):
        states.append(packed(random.getstate()))
        hooks.call(py_dataset_hooks.END)
        random.seed()
    assert [draw[2]["python"] for draw in hooks.order()["draws"]] == states
    with pytest.warns(RuntimeWarning, match="of a Shuffled have drawn .*so often.*Received: 3 calls.*`get_state`"):
        hooks.call(py_dataset_hooks.END)
    hooks.call(py_dataset_hooks.END)  # and only once
    assert len(hooks.order()["draws"]) == 3


def test_attributes_are_looked_at_only_where_it_is_needed(monkeypatch):
    looked = []
    monkeypatch.setattr(
        py_dataset_hooks, "attribute_orders", lambda source: looked.append(source) or attribute_orders(source)
    )

    def draw(indexes):
        indexes[:] = np.random.permutation(len(indexes))

    hooks = py_dataset_hooks.PyDatasetHooks(Shuffled(draw))
    for _ in range(5):
        hooks.call(py_dataset_hooks.END)
    assert len(looked) == 2, "about the first call: nobody asks for positions"
    del looked[:]
    hooks.follow()
    order = hooks.order()
    del looked[:]
    again = py_dataset_hooks.PyDatasetHooks(Shuffled(draw))
    again.repeat(order, within_epoch=False)
    assert again.calls == [0, 5] and len(looked) == 1, "compared once, at the end"
    again.follow()
    del looked[:]
    for _ in range(4):
        again.call(py_dataset_hooks.END)
    assert len(looked) == 4 + 1, "before a call only until it is known what shows a draw"


class Unrelated(Shuffled):
    """Has methods of these names for something else."""

    def get_state(self):
        return {"seen": {1, 2}}

    def set_state(self, state):
        raise AssertionError


class OfACountry(Unrelated):
    def get_state(self, country):
        return country


@pytest.mark.parametrize(("kind", "why"), [(Unrelated, "a value of type set"), (OfACountry, "TypeError: .*'country'")])
def test_a_get_state_that_cannot_be_saved_is_left_out(kind, why):
    view = PyDatasetView(kind(np.random.shuffle), shuffle=False)
    with pytest.warns(RuntimeWarning, match=f"a {kind.__name__} tells of .*is not saved. Received: {why}"):
        view.follow()
    view.on_epoch_begin()
    view.begin_pass()
    assert view[0] is not None and view.order(1)["own"] is None and not view.keeps_state
