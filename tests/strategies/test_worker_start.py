"""What workers agree on when they start, without a launcher that has seeded their generators."""

import json
import random

import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies import worker_start

SEED = 5
OF_THE_SEED = [random.Random(SEED).random(), np.random.RandomState(SEED).random_sample()]


@pytest.fixture
def agree(monkeypatch):
    """`agree(draws=…)`: the next numbers of Python and NumPy, and TensorFlow's seed, on worker 1 of two.

    Each generator has made that many draws before. Worker 0 has another state, or the same, and may have drawn, too.
    """
    states = random.getstate(), np.random.get_state()
    set_seeds = []

    def call(*, draws=0, differs=True, other_has_drawn=False, own_seed=None):
        random.seed(1)
        np.random.seed(1)
        monkeypatch.setattr(worker_start, "_STATES_AT_IMPORT", worker_start._states_of_generators())
        monkeypatch.setattr(worker_start, "global_seed", lambda: own_seed)
        monkeypatch.setattr(tf.random, "set_seed", set_seeds.append)
        for _ in range(draws):
            random.random()
            np.random.random()

        def exchange(name, proposed, rank, num_workers):
            _, states, unused = json.loads(proposed)
            states = {kind: state + differs for kind, state in states.items()}
            unused = dict.fromkeys(unused, False) if other_has_drawn else unused
            return [json.dumps([SEED, states, unused]), proposed]

        monkeypatch.setattr(worker_start.key_values, "exchange", exchange)
        set_seeds.clear()
        worker_start.agree_on_random_seed(1, 2, "seed")
        return [random.random(), np.random.random()], list(set_seeds)

    yield call
    random.setstate(states[0])
    np.random.set_state(states[1])


def own_numbers(draws=0):
    python, numpy = random.Random(1), np.random.RandomState(1)
    return [[python.random(), numpy.random_sample()] for _ in range(draws + 1)][-1]


def test_generators_that_nobody_has_used_start_from_the_seed_of_worker_0(agree):
    assert agree() == (OF_THE_SEED, [SEED])


def test_generators_that_a_program_has_seeded_or_used_continue(agree):
    assert agree(draws=2) == (own_numbers(2), [SEED])
    assert agree(other_has_drawn=True) == (own_numbers(), [SEED])
    assert agree(differs=False) == (own_numbers(), [SEED])


def test_a_seed_of_tensorflow_that_the_program_has_set_is_kept(agree):
    assert agree(own_seed=3)[1] == []
