"""The strategy of a probe: one worker without a cluster that traces the steps of a worker of N."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import tfdist.strategies
from tfdist.collectives.all_reduce import ReplicaHierarchy
from tfdist.collectives.buckets import DEFAULT_BUCKET_BYTES
from tfdist.collectives.byte_counters import ByteCounters
from tfdist.collectives.recorded_reduction import KeptGradients
from tfdist.compression import Policy
from tfdist.strategies import MultiWorkerMirroredStrategy
from tfdist.tensorflow_internals.collective_launcher import alone, loop_back

_OURS = ("MirroredStrategy", "MultiWorkerMirroredStrategy", "ParameterServerStrategy", "ModelParallelStrategy")
_TENSORFLOWS = ("MirroredStrategy", "MultiWorkerMirroredStrategy", "OneDeviceStrategy", "ParameterServerStrategy")


class ProbeStrategy(MultiWorkerMirroredStrategy):
    """One worker until `act_as_worker_of`, then the first of several workers whose collectives return at once.

    The environment must not describe a cluster.
    """

    def act_as_worker_of(self, members: int) -> KeptGradients:
        """Makes functions that are traced from now on those of worker 0 of `members` workers, which keeps gradients."""
        reductions: list[KeptGradients] = []

        def reduction(everyone: Any, cross: Any, local: Any, rank: int) -> KeptGradients:
            hierarchy = ReplicaHierarchy(everyone, cross, local, rank)
            counters = ByteCounters(everyone.host)
            reductions.append(
                KeptGradients(hierarchy, self._reduction_context, DEFAULT_BUCKET_BYTES, Policy(None), counters=counters)
            )
            return reductions[-1]

        loop_back(self.extended, members, reduction)
        return reductions[0]

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Returns the dataset, whose batches are those of this worker."""
        with alone(self.extended):
            return super().experimental_distribute_dataset(dataset, options)

    def distribute_datasets_from_function(self, dataset_fn: Any, options: Any = None) -> Any:
        with alone(self.extended):
            return super().distribute_datasets_from_function(dataset_fn, options)

    def summary(self, model: Any, print_fn: Callable[[str], Any] | None = None) -> None:
        """Does nothing: this process has no stages that `ModelParallelStrategy` would print."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            "The program uses something of its strategy that does not exist while it is measured. Received: "
            f"{name!r}. Expected: attributes of `tf.distribute.Strategy` and MultiWorkerMirroredStrategy before the "
            "first `fit`. Write `strategy = tfdist.strategies.planned()`, or use it after `fit`."
        )


def stand_in_for_all(strategy: ProbeStrategy) -> None:
    """Makes the program use `strategy` for every strategy that it creates from now on, and in every scope."""
    own_scope: Callable[[], Any] = strategy.scope

    class AnyStrategy(type(ProbeStrategy)):  # type: ignore[misc]
        """The class of `StandIn`."""

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, ProbeStrategy)

    class StandIn(ProbeStrategy, metaclass=AnyStrategy):
        """What a program gets in place of a strategy's class: calls return the probe's strategy."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return strategy

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            """Does nothing: the strategy exists already."""

    for name in _OURS:
        setattr(tfdist.strategies, name, StandIn)
    setattr(tfdist.strategies, "planned", lambda *args, **kwargs: strategy)  # noqa: B010
    for module in (tf.distribute, tf.distribute.experimental):
        for name in _TENSORFLOWS:
            setattr(module, name, StandIn)
    tf.distribute.Strategy.scope = functools.wraps(tf.distribute.Strategy.scope)(lambda self: own_scope())
