"""What a step has written is taken back; what it has created cannot be."""

from types import SimpleNamespace

import pytest
import tensorflow as tf

from tfdist.elastic.step_transactions import StepTransactions, WrittenVariables
from tfdist.exchange.exchange_errors import ExchangeError

pytestmark = pytest.mark.usefixtures("cpus")


def test_values_are_those_before_the_step():
    variable, total = tf.Variable([1.0, 2.0]), tf.Variable(0.0)
    written = WrittenVariables(lambda: [variable], lambda: [total])
    for step in range(3):
        before = written.read()
        variable.assign_add([1.0, 1.0])
        total.assign(5.0)
        written.take_back(before)
        assert variable.numpy().tolist() == [1.0, 2.0], step
        assert total.numpy() == 0.0, step


def test_a_first_step_that_creates_variables_is_an_error():
    variables = [tf.Variable(1.0)]
    written = WrittenVariables(lambda: variables)
    before = written.read()
    variables.append(tf.Variable(2.0))
    with pytest.raises(ExchangeError, match="during the first step"):
        written.take_back(before)


def test_what_the_first_step_creates_is_known_in_the_second():
    variables = [tf.Variable(1.0)]
    written = WrittenVariables(lambda: variables)
    written.read()
    variables.append(tf.Variable(2.0))
    before = written.read()
    variables[1].assign(7.0)
    written.take_back(before)
    assert variables[1].numpy() == 2.0


def test_what_each_step_sets_may_be_created():
    variable, created = tf.Variable(1.0), []
    written = WrittenVariables(lambda: [variable], lambda: created)
    before = written.read()
    created.append(tf.Variable(3.0))
    written.take_back(before)
    assert created[0].numpy() == 0.0, "nothing is counted yet"


class Follower:
    def __init__(self, common_state):
        self.common_state = common_state


def test_a_worker_that_joins_gets_what_all_have_in_common():
    def transactions(*values):
        followers = [Follower(tf.Variable(value)) for value in values]
        made = StepTransactions(SimpleNamespace(connected_view=None), lambda: None, lambda view: None)
        for follower in followers:
            made.tell(follower)
        return made, followers

    (trained, of_trained), (joins, of_joining) = transactions([1.5], [2.0], [3.0]), transactions([0.0], [0.0])
    del of_trained[1]
    values = trained.common_states()
    assert values == [[1.5], None, [3.0]]
    joins.use_common_states(values)
    assert [one.common_state.numpy().tolist() for one in of_joining] == [[1.5], [0.0]]
