"""Answers whether a step counts, as soon as the agreement knows it, without a thread that waits for that."""

import queue
from collections.abc import Callable, Generator

from tfdist.membership.agreement import Agreement
from tfdist.membership.decisions import View

Answer = Callable[[bool | Exception], None]
Waiting = Generator[None, None, None]


class CommitRequests:
    """The last step of which this worker has all sums. Its methods are called by who holds the lock of the agreement.

    Args:
        waiting: Takes a condition, and returns what yields until that is true. It raises an error if this worker
            cannot continue.
    """

    def __init__(self, waiting: Callable[[Callable[[], bool]], Waiting]) -> None:
        self._waiting = waiting
        self._asked: tuple[Generator[None, None, bool], Answer] | None = None

    def ask(self, agreement: Agreement, view: View, answer: Answer) -> None:
        """Says that this worker has all sums of its step, which it has computed in `view`.

        `answer` is called once, here or by `answer_if_known`: with whether the step counts, or with an error.
        """
        self._asked = self._committing(agreement, view), answer
        self.answer_if_known()

    def answer_if_known(self) -> None:
        """Answers if it is known whether the step counts, or this worker cannot continue."""
        if self._asked is None:
            return
        committing, answer = self._asked
        counts: bool | Exception
        try:
            next(committing)
        except StopIteration as end:
            counts = end.value
        except Exception as error:
            counts = error
        else:
            return
        self._asked = None
        answer(counts)

    def _committing(self, agreement: Agreement, view: View) -> Generator[None, None, bool]:
        step = agreement.committed + 1
        if agreement.view == view:
            agreement.has_sums()
        yield from self._waiting(lambda: agreement.committed >= step or agreement.view != view)
        return agreement.committed >= step


def answer_of(ask: Callable[[Answer], None]) -> bool:
    """Waits for what `ask`'s argument is called with; returns it, or raises the error."""
    answers: queue.SimpleQueue[bool | Exception] = queue.SimpleQueue()
    ask(answers.put)
    counts = answers.get()
    if isinstance(counts, Exception):
        raise counts
    return counts
