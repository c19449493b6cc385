"""What a view of a PyDataset keeps of its batches and hooks, and what it looks at for that."""

import random
import warnings

import numpy as np
import pytest
from data_runs import SEED
from py_datasets import NoisyInSome, Remembering, Shuffled
from recovered_runs import STEPS

from tfdist.keras_internals import py_dataset_hooks
from tfdist.keras_internals.attribute_orders import attribute_orders
from tfdist.keras_internals.py_dataset_view import PyDatasetView
from tfdist.keras_internals.random_states import packed, same, set_global_states, unpacked
from tfdist.keras_internals.read_ahead import ReadAhead, unsavable
from tfdist.recovery.json_values import to_json

pytestmark = pytest.mark.usefixtures("cpus")


@pytest.fixture(autouse=True)
def _strict():
    """Only what `pytest.warns` expects may be warned of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


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


@pytest.mark.parametrize(
    "value",
    [None, True, 1, 1.5, "a", np.float32(1), np.int64(1), np.complex64(1), np.datetime64(0, "s"), np.arange(3), b"a"]
    + [np.array(["a"]), np.array([1j]), [1, {2}], (1, 2), {"a": [np.arange(2)]}, {1: 2}, {"a": object()}],
)
def test_what_cannot_be_saved_is_what_a_checkpoint_refuses(value):
    try:
        to_json(value)
    except ValueError:
        assert unsavable(value) is not None
    else:
        assert unsavable(value) is None
