"""Errors of a worker that cannot train on, although others may."""

from tfdist.exchange.exchange_errors import ExchangeError
from tfdist.membership.decisions import NoMajority


class ExcludedWorkerError(ExchangeError):
    """The other workers continue without this one.

    Args:
        rank: The rank of this worker.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(
            f"The other workers train on without worker {rank}. Received: their decision, as they did not reach this "
            "worker. Expected: a worker answers within the limit of silence. It was frozen, or its network was "
            "cut; start it again, and it joins them."
        )


class NoMajorityError(ExchangeError):
    """Too few workers are left to know that the others do not continue.

    Args:
        obstacle: Who is left of which view.
        seconds: How long this worker has waited.
        ranks: The number of ranks.
    """

    def __init__(self, obstacle: NoMajority, seconds: float, ranks: int) -> None:
        members, present, ended = (
            [number % ranks for number in numbers] for numbers in (obstacle.members, obstacle.present, obstacle.ended)
        )
        missing = [rank for rank in members if rank not in (*present, *ended)]
        super().__init__(
            f"Too few workers are left to train on. Received: of the workers {members} only "
            f"{present} reach each other, {ended} have ended, and {missing} have been "
            f"silent for more than {seconds:g} s and may train without them. Expected: more than half of them, half "
            "with the first of them, or all that have not ended. Repair the network, and start all workers "
            "again: with `FailureRecovery` they continue from the last checkpoint."
        )


class JoinError(ExchangeError):
    """A worker cannot join the others.

    Args:
        reason: Why.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"This worker cannot join the training. Received: {reason}. Expected: a worker that trains sends its "
            "state. If others train still, start this worker again; if not, the training has ended."
        )


class LeftWorkersError(ExchangeError):
    """This worker has left the others, or its connections to them have failed, and it trains on.

    Args:
        reason: Why.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"This worker has left the others. Received: a step, or a wait for the others, after {reason}. Expected: "
            "steps while the program runs, and none in other threads when it ends. Start this worker again, and it "
            "joins the others."
        )
