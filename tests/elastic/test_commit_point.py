"""Steps whose graphs write when they count: refused, repeated, failed, and replayed ones."""

import threading
import types

import keras
import pytest
import tensorflow as tf

from tfdist.elastic.commit_point import CommitPoint
from tfdist.elastic.step_transactions import StepTransactions, WrittenVariables
from tfdist.exchange.exchange_errors import WorkerLostError
from tfdist.membership.decisions import View
from tfdist.membership.membership_errors import LeftWorkersError
from tfdist.strategies import MirroredStrategy, replicated_strategy

pytestmark = pytest.mark.usefixtures("cpus")


class _Group:
    """Two workers that agree on whether a step counts as `answers` say: truth values, or errors."""

    def __init__(self, *answers):
        self.answers, self.failures = list(answers), []
        view = self.connected_view = View((1, 0), (0, 1))
        self.membership = types.SimpleNamespace(
            is_member=True, view=view, wait_for_view=lambda: view, commit=self._commit, committed_steps=0
        )
        self.membership.commit_then = self._commit_then
        self.membership.report_failure = lambda view, rank: self.failures.append(rank)
        self.donor = types.SimpleNamespace(is_sending=False)
        self.log = types.SimpleNamespace(take=list, keep=lambda is_wanted: None)

    def _commit(self, view):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _commit_then(self, view, answer):
        answer(self.answers.pop(0))


class _Training:
    """A step that adds its sum to a weight, and counts in a variable that its exchange uses."""

    def __init__(self, *answers):
        self.group, self.failure = _Group(*answers), None
        self._queue = tf.queue.FIFOQueue(9, [tf.float32])
        self.weight, self.asked = tf.Variable([10.0]), tf.Variable(0.0)
        self.transactions = StepTransactions(
            self.group, lambda: self.failure, lambda view: None, handles=lambda: [self._queue.queue_ref]
        )
        self._written = WrittenVariables(lambda: [self.weight, self.asked], writes_late=True)
        self.attempts = 0

        @tf.function(autograph=False)
        def step(fails):
            with tf.control_dependencies([tf.debugging.assert_equal(fails, False, "an error of the program")]):
                asked = self.asked.assign_add(1.0)
            with tf.control_dependencies([self._queue.enqueue(asked)]):
                self.weight.assign_add([self._queue.dequeue()])
            self.transactions.commit_before_writes()

        self._step = step

    def run(self, *, fails=False):
        def step():
            self.attempts += 1
            self._step(tf.constant(fails))

        self.transactions.run(step, self._written)
        return self.weight.numpy().item(), self.asked.numpy().item()


def test_a_step_that_does_not_count_writes_nothing_and_is_made_again():
    training = _Training(True, True, True, False, False, True)
    assert [training.run() for _ in range(4)] == [(11.0, 1.0), (13.0, 2.0), (16.0, 3.0), (20.0, 4.0)]
    assert training.attempts == 6
    assert training.transactions.changes.repeated_steps == 2
    assert not training.group.failures, "the exchange has not failed"


def test_late_values_are_not_kept():
    training = _Training(True, True, True)
    for _ in range(3):
        training.run()
    assert [value.numpy().item() for _, value in training._written.read()] == [3.0]


def test_what_ends_this_worker_is_raised():
    lost = LeftWorkersError("the end of its program")
    training = _Training(True, lost)
    training.run()
    with pytest.raises(LeftWorkersError) as raised:
        training.run()
    assert raised.value is lost
    assert training.weight.numpy().item() == 11.0


def test_an_exchange_that_fails_after_the_step_counts_ends_this_worker():
    """The others have written it, so it cannot be made again."""
    training = _Training(True, True, True)
    training.run()
    training.run()

    def step():
        training._step(tf.constant(False))
        training.failure = WorkerLostError(1, "its process has ended", "the next exchange")
        raise tf.errors.InternalError(None, None, "the next exchange")

    with pytest.raises(tf.errors.InternalError):
        training.transactions.run(step, training._written)
    assert not training.group.failures


def test_an_error_of_the_program_does_not_make_the_next_step_count():
    training = _Training(True, True, True)
    training.run()
    training.run()
    with pytest.raises(tf.errors.InvalidArgumentError, match="an error of the program"):
        training.run(fails=True)
    asked = training.asked.numpy().item()
    assert training.run() == (13.0 + asked + 1.0, asked + 1.0)


def test_what_a_step_that_fails_has_asked_is_not_the_answer_to_a_later_one():
    training = _Training(True, True, False, True)
    training.run()
    training.run()
    point = training.transactions._commit_point
    point._request()  # by the step that fails
    with pytest.raises(tf.errors.InvalidArgumentError, match="an error of the program"):
        training.run(fails=True)
    attempts = training.attempts
    assert training.run() == (16.0, 3.0)
    assert training.attempts == attempts + 2, "the answer was that to this step"


def test_what_a_step_that_fails_alone_has_asked_is_not_the_answer_to_a_later_one():
    training = _Training(False, True)
    training.group.membership.is_member = False
    training.run()
    training.run()
    training.transactions._commit_point._request()  # by the step that fails
    with pytest.raises(tf.errors.InvalidArgumentError, match="an error of the program"):
        training.run(fails=True)
    training.group.membership.is_member = True
    attempts = training.attempts
    assert training.run() == (16.0, 3.0)
    assert training.attempts == attempts + 2, "the answer was that to this step"


def test_the_answer_to_the_next_step_is_waited_for_though_that_to_the_last_one_has_just_been_given(monkeypatch):
    """The next step may ask before the thread that has answered the last one continues."""
    answers = []
    point, enqueue = CommitPoint(answers.append), tf.raw_ops.QueueEnqueueV2

    def enqueue_and_ask(**arguments):
        enqueue(**arguments)
        monkeypatch.setattr(tf.raw_ops, "QueueEnqueueV2", enqueue)
        point._answers.dequeue()
        point._request()

    point._request()
    monkeypatch.setattr(tf.raw_ops, "QueueEnqueueV2", enqueue_and_ask)
    answers[0]("")
    settling = threading.Thread(target=point.settle)
    settling.start()
    settling.join(0.1)
    is_waiting = settling.is_alive()
    answers[1]("")
    settling.join()
    assert is_waiting
    assert not int(point._answers.size())


def test_a_function_that_now_runs_eagerly_is_taken_back_as_a_whole():
    training = _Training(True, True, True)
    for _ in range(3):
        training.run()
    tf.config.run_functions_eagerly(True)
    try:
        values = training._written.read()
        training.weight.assign([7.0])
        training._written.take_back(values)
    finally:
        tf.config.run_functions_eagerly(False)
    assert training.weight.numpy().item() == 16.0


def test_a_worker_that_repeats_steps_does_not_ask():
    """But once it is one of the others, it keeps what its graph, which was traced before, writes early."""
    training = _Training(True, True, True, False, True)
    training.group.membership.is_member = False
    assert training.run() == (11.0, 1.0)
    assert training.run() == (13.0, 2.0)
    training.group.membership.is_member = True
    assert [training.run() for _ in range(4)][-1] == (31.0, 6.0)
    assert len(training._written.read()) == 1


def test_shares_of_rows_are_written_late_too(cpus, monkeypatch):
    """They are changed after the step of Keras, by what it reports."""
    order = []
    monkeypatch.setattr(replicated_strategy, "is_complete", lambda data: True)
    monkeypatch.setattr(replicated_strategy, "step_on_replicas", lambda *_: lambda data: (data, data))
    strategy = MirroredStrategy(cpus[:1])
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    strategy.row_shares = types.SimpleNamespace(add_step=lambda report: order.append("shares"))
    strategy._elastic = types.SimpleNamespace(write_late=lambda: order.append("late"))
    tf.function(lambda: strategy.run(model.train_step, (tf.zeros([1, 1]),)), autograph=False).get_concrete_function()
    assert order == ["shares", "late"]
