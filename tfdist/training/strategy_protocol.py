"""What callbacks and recovery may ask any strategy, whether it is one of tfdist's or of TensorFlow's."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfdist.collectives import CommunicationStats, CompressionState, LinkStats
from tfdist.collectives.all_reduce import ReplicaReduction
from tfdist.load_balancing.row_shares import RowShares
from tfdist.training.metric_totals import MetricTotals
from tfdist.training.step_guard import LastBatch, StepGuard


class TrainingStrategy(Protocol):
    """The interface of every strategy of `tfdist.strategies`.

    The strategies derive from this class explicitly, so that `is_tfdist_strategy` reads no property. Use
    `training_strategy` to view any other strategy through the same interface.

    Attributes:
        plan: The plan by which `tfdist.strategies.planned()` created it; None if it was created by hand.
        row_shares: Which rows of global batches each worker computes; None if the strategy does not divide them by
            shares.
        local_updates: How workers train by themselves between two exchanges of weights; None if they do not.
        state_sharding: How the slots of optimizers are split over the replicas; None if each has all of them.
        step_guard: What looks at each training step of `fit` before the next one begins; None if nothing does.
        last_batch: Where the steps of `fit` leave their batches; None if nobody needs them.
        may_lose_workers: Whether the others train on when a worker is lost.
    """

    plan: Any = None
    row_shares: RowShares | None = None
    local_updates: Any = None
    state_sharding: Any = None
    step_guard: StepGuard | None = None
    last_batch: LastBatch | None = None
    may_lose_workers: bool = False

    @property
    def rank(self) -> int:
        """The rank of this process among those that call `fit`. The chief has rank 0.

        By default 0: one process alone calls `fit`, as the chief does under parameter servers.
        """
        return 0

    @property
    def num_workers(self) -> int:
        """The number of workers; by default 1, this process. Under parameter servers the chief is not counted."""
        return 1

    @property
    def living_ranks(self) -> tuple[int, ...]:
        """The ranks of the workers that train at the moment, by default all."""
        return tuple(range(self.num_workers))

    def values_of_workers(self, values: np.ndarray) -> np.ndarray:
        """Returns the values of all workers, `[number of workers, ...]` by rank; all workers call this.

        Those of a worker that does not train at the moment are zero. By default there is one process.
        """
        return values[np.newaxis]

    def leave_others(self) -> None:
        """Leaves the workers that train on without this one, if they may lose it."""
        return

    def written_variables(self, model: Any, *, with_metrics: bool = True) -> Any:
        """Returns the `WrittenVariables` of a training step of a model, whose `read` and `take_back` undo the step.

        Without metrics it has the variables of the model and its optimizers only. By default a step cannot be undone.
        """
        del model, with_metrics
        raise NotImplementedError

    @property
    def replicas_of_workers(self) -> Sequence[int]:
        """The number of replicas of each worker, by rank; they differ if the workers' numbers of devices do."""
        ...

    @property
    def communication(self) -> CommunicationStats:
        """What this worker's first replica has sent so far; under parameter servers, the pushes of all workers."""
        ...

    def communication_by_link(self, step: str | None = None) -> dict[tuple[str, str], LinkStats] | None:
        """What each device has sent to each other one in steps of one kind, or in all of them.

        None under strategies whose models have no stages.
        """
        del step
        return None

    @property
    def gradient_reduction(self) -> ReplicaReduction | None:
        """The reduction of this process's first replica, which counts and times gradients.

        None if the replicas do not reduce gradients with tfdist's collectives.
        """
        return None

    @property
    def compression_state(self) -> CompressionState | None:
        """The state of this process's compressors, or None if the strategy saves none."""
        return None

    def run_update(self, model: Any, update: Callable[[], None]) -> None:
        """Calls `update`, which updates a model between two steps. All workers call this eagerly."""
        del model
        update()

    @property
    def metric_totals(self) -> MetricTotals | None:
        """The sums of the states of metrics over all workers, if these may be lost."""
        return None

    @property
    def elastic_coordination(self) -> Any:
        """How the workers of an elastic training agree on saves, a `recovery` `Coordination`; None in others."""
        return None

    @property
    def worker_stats(self) -> Sequence[Any]:
        """Under parameter servers a `WorkerStats` for each worker; empty under other strategies."""
        return ()


class _StockStrategy(TrainingStrategy):
    """View of a strategy that is not tfdist's: nothing is counted, and this process is the chief."""

    communication = CommunicationStats()

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    @property
    def num_workers(self) -> int:
        # Read on demand: the resolver of a TPU asks a service on every call, which may fail.
        resolver = getattr(self._strategy, "cluster_resolver", None)
        spec = resolver.cluster_spec() if resolver is not None else None
        tasks = spec.as_dict() if spec else {}
        is_chief_alone = isinstance(self._strategy, tf.distribute.ParameterServerStrategy)
        jobs = ("worker",) if is_chief_alone else ("chief", "worker")
        return max(sum(len(tasks.get(job, ())) for job in jobs), 1)

    @property
    def replicas_of_workers(self) -> Sequence[int]:
        return (self._strategy.num_replicas_in_sync // self.num_workers,) * self.num_workers


def is_tfdist_strategy(strategy: Any) -> bool:
    """Whether `strategy` is one of `tfdist.strategies`."""
    return TrainingStrategy in type(strategy).__mro__


def training_strategy(strategy: Any) -> TrainingStrategy:
    """Views any strategy as a `TrainingStrategy`.

    Returns:
        `strategy` itself if it is one of tfdist's. Otherwise an object with rank 0, the number of workers that the
        strategy's cluster resolver knows, and empty counters.
    """
    return strategy if is_tfdist_strategy(strategy) else _StockStrategy(strategy)
