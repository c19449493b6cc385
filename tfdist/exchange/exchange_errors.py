"""Errors of an exchange. All workers raise the same one."""

from collections.abc import Sequence

from tfdist.exchange.exchange_calls import differ_in_shape


class ExchangeError(RuntimeError):
    """An exchange failed, and so do all later ones of the same connections.

    Attributes:
        leaves_workers: Whether all workers are still there, so that new strategies can connect them again.
    """

    leaves_workers = False


class WorkerLostError(ExchangeError):
    """Another worker ended, lost its connection, is silent, or sent what no worker sends.

    Args:
        rank: The rank of that worker.
        cause: What happened to it: "its process has ended".
        doing: What this worker was doing: "all-reduce 12 of 1000 float32 values".
    """

    def __init__(self, rank: int, cause: str, doing: str) -> None:
        super().__init__(
            f"Worker {rank} is lost. Received: {cause}, during {doing}. Expected: all workers take part in each "
            "exchange. The log of that worker says why. Restart the workers together, as `tfdist run --max-restarts` "
            "does."
        )
        self.rank, self.cause = rank, cause


class LateWorkerError(ExchangeError):
    """An exchange took longer than the program allows.

    Args:
        ranks: The ranks of the workers that this worker waited for.
        seconds: The limit.
        call: The exchange: "all-reduce 12 of 1000 float32 values".
    """

    leaves_workers = True

    def __init__(self, ranks: Sequence[int], seconds: float, call: str) -> None:
        self.ranks, self.seconds, self.call = list(ranks), seconds, call
        super().__init__(
            "An exchange takes longer than `timeout_seconds` of `communication_options`. Received: "
            f"{call}, which waits for worker {', '.join(map(str, self.ranks))} for more than {seconds:g} s. Expected: "
            "all workers take part within that time. Look at what these workers do, or raise the limit; without one, "
            "lost and silent workers are found, too."
        )


class ClosedExchangeError(ExchangeError):
    """This worker has left the exchange.

    Args:
        call: What it called then: "all-reduce 12 of 1000 float32 values".
    """

    def __init__(self, call: str) -> None:
        super().__init__(
            f"The exchange with the other workers is closed. Received: {call}. Expected: exchanges before the program "
            "ends. Let all threads that train, evaluate or predict end before the main program."
        )


class ExchangeMismatchError(ExchangeError):
    """Workers called different exchanges: another program, other shapes, or another number of batches.

    Args:
        calls: What each of two workers called, by rank.
    """

    leaves_workers = True

    def __init__(self, calls: dict[int, str]) -> None:
        self.calls = calls
        received = "; ".join(f"worker {rank}: {call}" for rank, call in sorted(calls.items()))
        if differ_in_shape(calls.values()):
            received += " (Shape mismatch)"  # TensorFlow's words
        super().__init__(
            f"The workers call different exchanges. Received: {received}. Expected: the same exchanges in the same "
            "order on all workers. Run the same program with the same arguments everywhere, and give all workers "
            "the same number of batches and models of the same shapes."
        )
