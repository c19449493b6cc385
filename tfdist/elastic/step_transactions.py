"""Steps that are written on all workers that continue, or on none: what was written is taken back if one is lost.

A worker that joins repeats the steps of the others with their sums in place of exchanges, and computes no rows until
it is one of them.
"""

import dataclasses
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import tensorflow as tf

from tfdist.elastic.commit_point import CommitPoint
from tfdist.exchange.exchange_errors import ExchangeError, WorkerLostError
from tfdist.membership.decisions import NO_VIEW, View
from tfdist.membership.elastic_group import ElasticGroup
from tfdist.membership.membership_errors import JoinError
from tfdist.membership.state_transfer import StateReceiver
from tfdist.tensorflow_internals.late_writes import write_after
from tfdist.utils.temporary_values import setting_attributes

_STEPS_THAT_CREATE = 2
_LAST_SECONDS = 3.0  # for which a worker whose donor is lost may still be taken in
_Result = TypeVar("_Result")
Values = Sequence[tuple[Any, Any]]
"""Variables and their values."""


class Written(Protocol):
    """What a step writes."""

    def read(self) -> Any:
        """Returns the values before a step."""
        ...

    def take_back(self, values: Any) -> None:
        """Gives back the values that `read` has returned."""
        ...

    def trace(self, write_after: Callable[[Sequence[Any]], set[int]]) -> None:
        """Gets to know that the graph of a step is being traced.

        Args:
            write_after: Lets its writes to variables wait until the step counts, as far as possible. It takes the
                handles of the variables, and returns the ids of those to which the graph writes before.
        """
        ...


class WrittenVariables:
    """All that the steps of a function may write, on this worker.

    Once it has been traced, only values to which a step may write before it counts are kept.

    Args:
        find: Returns them. It is asked before the first two steps: the first may create some.
        find_overwritten: Returns others, whose values before the first step do not matter, as each step sets them.
        writes_late: Whether all exchanges of a step are in the graph of `Strategy.run`, so that its writes may wait.
    """

    def __init__(
        self,
        find: Callable[[], Sequence[tf.Variable]],
        find_overwritten: Callable[[], Sequence[tf.Variable]] = tuple,
        *,
        writes_late: bool = False,
    ) -> None:
        self._writes_late = writes_late
        self._find, self._find_overwritten, self._steps = find, find_overwritten, 0
        self._early: set[int] | None = None  # handles to which some graph writes before its step counts
        self._is_traced = False  # since values were last read

    def read(self) -> Values:
        """Returns the values before a step. They share the memory of the variables until the step writes these."""
        if self._steps < _STEPS_THAT_CREATE:
            found = self._find()
            self._known = set(map(id, found))
            self._variables = [*found, *self._find_overwritten()]
            self._early_variables = self._variables
        elif self._is_traced:
            self._early_variables, self._is_traced = self._written_early(), False
        self._steps += 1
        # A function that has been traced, and now runs eagerly, writes without waiting.
        self._kept = self._variables if tf.config.functions_run_eagerly() else self._early_variables
        with tf.init_scope():
            return [(variable, _value_of(variable)) for variable in self._kept]

    def trace(self, write_after: Callable[[Sequence[Any]], set[int]]) -> None:
        """Lets the writes of the graph wait, and keeps no values any more of the variables that it writes late."""
        if not self._writes_late:
            return
        variables = [*self._find(), *self._find_overwritten()]
        self._early = (self._early or set()) | write_after([variable.handle for variable in variables])
        self._is_traced = True

    def take_back(self, values: Values) -> None:
        """Gives the variables the values that `read` has returned, before this step or an earlier one.

        Raises:
            ExchangeError: The step was the first with its shapes, and has created variables, or writes others before
                it counts than earlier ones. Their values before it are not known.
        """
        if self._steps < _STEPS_THAT_CREATE:
            is_kept = self._known.issuperset(map(id, self._find()))
        else:
            is_kept = set(map(id, self._written_early())).issubset(map(id, self._kept))
        if not is_kept:
            raise ExchangeError(
                "A worker was lost during the first step of a function, which cannot be taken back. Received: new "
                "variables, as of compressed gradients, which that step has written. Expected: a loss after that "
                "step. Start the workers again."
            )
        with tf.init_scope():
            for variable, value in values:
                variable.assign(value)
            known = set(map(id, self._variables))
            for variable in self._find_overwritten():
                if id(variable) not in known:  # the step has created it
                    variable.assign(tf.zeros_like(variable))

    def _written_early(self) -> list[tf.Variable]:
        early = self._early
        return self._variables if early is None else [one for one in self._variables if id(one.handle) in early]


def _value_of(variable: Any) -> tf.Tensor:
    # A step of few milliseconds would notice the wrappers of TensorFlow.
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


NOTHING = WrittenVariables(tuple)


@dataclasses.dataclass(frozen=True)
class Changes:
    """What losses and joins of workers have cost.

    Attributes:
        lost: How many workers were lost.
        joined: How many have joined.
        repeated_steps: How many steps were computed again.
        seconds: How long was computed what did not count, and workers connected with each other.

    >>> Changes(lost=1).plus(joined=1, seconds=0.5)
    Changes(lost=1, joined=1, repeated_steps=0, seconds=0.5)
    """

    lost: int = 0
    joined: int = 0
    repeated_steps: int = 0
    seconds: float = 0.0

    def plus(self, **more: float) -> "Changes":
        """Returns it with more of what is named."""
        return dataclasses.replace(self, **{name: getattr(self, name) + value for name, value in more.items()})


@dataclasses.dataclass
class _Outcome:
    """Whether a step counts, once that is known, or why this worker cannot continue."""

    counts: bool | None = None
    error: Exception | None = None


class Follower(Protocol):
    """What divides the rows of steps among the workers that train."""

    @property
    def common_state(self) -> Any:
        """A variable that has the same value on all workers."""
        ...

    def follow(self, workers: Sequence[int]) -> None:
        """Other workers train than before: those of these numbers."""
        ...


class StepTransactions:
    """Runs steps, and again those during which a worker is lost, on the same data with the workers that are left.

    Args:
        group: The workers.
        failure: Returns the error that ended the present exchange with the other workers, if there is one.
        connect: Connects this worker with the members of a view. It may raise a `WorkerLostError` if one of them is
            lost meanwhile.
        sum_over_workers: Returns the sum of the workers' tensors.
        handles: Returns the handles of what every exchange in a graph uses.

    Attributes:
        group: The workers.
        fits: How many calls of `fit` have begun in this process.
        changes: What losses and joins have cost since the training began, as far as this worker knows.
        may_join: Whether this worker, which repeats steps, could compute again what a lost worker had accumulated.
    """

    def __init__(
        self,
        group: ElasticGroup,
        failure: Callable[[], ExchangeError | None],
        connect: Callable[[View], None],
        sum_over_workers: Callable[[tf.Tensor], tf.Tensor] = tf.identity,
        handles: Callable[[], Sequence[Any]] = tuple,
    ) -> None:
        self._sum = sum_over_workers
        self.group, self._failure, self._connect = group, failure, connect
        self._followers: list[weakref.ref[Follower]] = []
        self.fits = 0
        self._handles = handles
        self._commit_point: CommitPoint | None = None
        self._outcome: _Outcome | None = None  # of the step that is running, if workers agree on it
        self._written: Written = NOTHING
        self._view = group.connected_view
        self._receiver: StateReceiver | None = None
        self._is_running = False
        self.changes = Changes()
        self.may_join = True

    def tell(self, follower: Follower) -> None:
        """Tells an object of changes of the workers as long as it lives."""
        self._followers.append(weakref.ref(follower))

    def common_states(self) -> list[Any]:
        """Returns the values of what followers have in common with those of other workers, as JSON."""
        followers = [follower() for follower in self._followers]
        return [None if one is None else one.common_state.numpy().tolist() for one in followers]

    def use_common_states(self, values: Sequence[Any]) -> None:
        """Gives followers the values of another worker, which has created them in the same order."""
        for follower, value in zip(self._followers, values, strict=False):
            if (one := follower()) is not None and value is not None:
                one.common_state.assign(value)

    @property
    def is_running(self) -> bool:
        """Whether a step is running."""
        return self._is_running

    @property
    def is_alone(self) -> bool:
        """Whether this worker computes everything by itself: it has started while the others train."""
        return self._receiver is None and not self.group.membership.is_member

    @property
    def trains(self) -> bool:
        """Whether this worker computes its share of steps with others."""
        return self._receiver is None and self.group.membership.is_member

    @property
    def view(self) -> View:
        """The workers that compute the present step; `NO_VIEW` where this one computes by itself."""
        return self._view

    def replay(self, receiver: StateReceiver, changes: Changes) -> None:
        """Repeats the others' steps from now on. This worker has the state that it has received.

        The donor has counted `changes`.
        """
        assert receiver.state is not None
        self._receiver, self.changes = receiver, changes
        self.group.membership.has_replayed(receiver.state[0], is_ready=False)

    @property
    def is_oldest(self) -> bool:
        """Whether this worker is the oldest of those that run the present step, or have run the last one."""
        return self._view.members[:1] == (self.group.membership.number,)

    def sum_over_workers(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the workers' tensors. All call this, within a step or `run_alone`."""
        return self._sum(value)

    def value_of_oldest(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the value of the oldest worker. All call this, within a step or `run_alone`."""
        return self._sum(value if self.is_oldest else tf.zeros_like(value))

    def numbers_with(self, condition: bool, *conditions: bool) -> list[int]:
        """Returns of how many workers each condition is true. All call this, within a step or `run_alone`."""
        numbers = self._sum(tf.constant([*map(float, (condition, *conditions))]))
        return [round(float(number)) for number in numbers]

    def run_alone(self, exchange: Callable[[], _Result]) -> _Result:
        """Runs an exchange; outside of a step it is one by itself."""
        return exchange() if self._is_running else self.run(exchange, NOTHING)

    def trace(self, trace: Callable[[], None], written: Written) -> None:
        """Calls `trace`, which traces the graph of a step that has `written`, without running it.

        Raises:
            ReplayError: It exchanges something while it is traced.
        """
        with setting_attributes(self, _written=written, _is_running=True):
            self.group.log.replay([])
            try:
                trace()
            finally:
                self.group.log.replay(None)

    def compute_again(self, step: Callable[[], Any]) -> None:
        """Computes a step that counts already, within another one, which all workers do."""
        with setting_attributes(self, _outcome=None):
            self._attempt(step)

    def run(self, step: Callable[[], _Result], written: Written) -> _Result:
        """Runs a step, which all workers run, until it counts.

        Args:
            step: Computes and writes; called again after a loss, when what it has `written` is taken back.
            written: All that it may write.

        Raises:
            ExchangeError: This worker cannot continue: see `Membership.wait_for_view`.
            JoinError: It repeats steps, and the worker that sends them is lost, or no worker that trains is left.
            ReplayError: It repeats steps, and makes other exchanges than the others.
        """
        with setting_attributes(self, _written=written):
            if self.is_alone:
                return self._attempt(step)
            if self._receiver is not None and self._waits_for_results(self._receiver):
                return self._replayed(self._receiver, step)
            return self._run_until_it_counts(step, written)

    def _run_until_it_counts(self, step: Callable[[], _Result], written: Written) -> _Result:
        while True:
            began = time.monotonic()
            self._follow_view()
            before, outcome = written.read(), _Outcome()
            try:
                with setting_attributes(self, _outcome=outcome):
                    result = self._attempt(step)
            except (ExchangeError, tf.errors.OpError):
                if outcome.error is not None:
                    raise outcome.error from None
                lost = self._failure() if outcome.counts is None else None
                if outcome.counts is not False and not isinstance(lost, WorkerLostError):
                    raise
                written.take_back(before)
                if isinstance(lost, WorkerLostError):
                    self.group.membership.report_failure(self._view, lost.rank)
            else:
                if outcome.counts is None:
                    outcome.counts = self.group.membership.commit(self._view)
                if outcome.counts:
                    self._pass_on()
                    return result
                written.take_back(before)
            self.group.log.take()
            self.changes = self.changes.plus(repeated_steps=1, seconds=time.monotonic() - began)

    def commit_before_writes(self) -> None:
        """Lets the step whose graph is being traced write as late as possible: when it counts.

        Then what it writes need not be kept, which would take memory and the time to fill it.
        """
        if self._commit_point is None:
            self._commit_point = CommitPoint(self.ask_to_write)
        add = self._commit_point.add
        self._written.trace(lambda variables: write_after(variables, self._handles(), add))

    def ask_to_write(self, answer: Callable[[str], None]) -> None:
        """Calls `answer` once it is known whether the step that is running counts: with "", or why it must not write.

        A step calls this once, when it has all sums, or not at all.
        """
        outcome = self._outcome
        if outcome is None:  # this worker repeats a step that counts, or computes by itself
            return answer("")

        def know(counts: bool | Exception) -> None:
            if isinstance(counts, Exception):  # raised where the step was called
                outcome.error = counts
            else:
                outcome.counts = counts
            answer("" if outcome.counts else "The step does not count: a worker is lost.")

        return self.group.membership.commit_then(self._view, know)

    @contextmanager
    def _settled_on_error(self) -> Iterator[None]:
        """If the body fails, what it has asked of the others is answered when this ends: not in a later step."""
        try:
            yield
        except BaseException:
            if self._commit_point is not None:
                self._commit_point.settle()
            raise

    def _attempt(self, step: Callable[[], _Result]) -> _Result:
        with setting_attributes(self, _is_running=True), self._settled_on_error():
            return step()

    def _pass_on(self) -> None:
        """Sends the results of a step that counts to those that join."""
        donor = self.group.donor
        if donor.is_sending:
            donor.send_step(self.group.membership.committed_steps, self.group.log.take())
        else:
            self.group.log.keep(False)

    def _waits_for_results(self, receiver: StateReceiver) -> bool:
        """Waits for what the others have exchanged in the next step; returns whether there is such a step.

        Otherwise this worker is one of them from this step on.
        """
        membership = self.group.membership

        def is_lost() -> bool:
            return bool(receiver.failure) or receiver.donor not in membership.donors

        membership.wait_to_join(lambda: receiver.has_step or is_lost())
        if is_lost() and not receiver.has_step:
            # The others may take it in with the steps that it has.
            membership.wait_to_join(lambda: receiver.has_step, _LAST_SECONDS)
        if membership.is_member:
            self.group.log.replay(None)
            self._receiver = None
            receiver.close()
            return False
        if not receiver.has_step:
            receiver.close()
            raise JoinError(f"worker {receiver.donor}, which sends its state, is lost ({receiver.failure or 'silent'})")
        return True

    def _replayed(self, receiver: StateReceiver, step: Callable[[], _Result]) -> _Result:
        number, results = receiver.next_step()
        self.group.log.replay(results)
        result = self._attempt(step)
        self.group.log.replay([])
        self.group.membership.has_replayed(number, is_ready=self.may_join)
        return result

    def _follow_view(self) -> None:
        """Connects this worker with those that the workers have agreed on."""
        while (view := self.group.membership.wait_for_view()) != self._view:
            began = time.monotonic()
            try:
                self._connect(view)
            except WorkerLostError as error:
                self.group.membership.report_failure(view, error.rank)
                continue
            for follower in [one() for one in self._followers]:
                if follower is not None:
                    follower.follow(view.members)
            before, now = set(self._view.members or view.members), set(view.members)
            joined = len(now - before) + (self._view == NO_VIEW)
            seconds = time.monotonic() - began
            self.changes = self.changes.plus(lost=len(before - now), joined=joined, seconds=seconds)
            self._view = view
