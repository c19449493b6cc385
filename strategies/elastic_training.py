"""What `MultiWorkerMirroredStrategy(elastic=True)` does in `fit`, `evaluate` and `predict`."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.data_position.resumable_iterator import patch_epoch_iterator
from tfdist.elastic.elastic_accumulation import Accumulators, ElasticAccumulation
from tfdist.elastic.elastic_coordination import ElasticCoordination
from tfdist.elastic.elastic_fit import ElasticFit
from tfdist.elastic.loop_member import LoopMember
from tfdist.elastic.loop_state import LoopState
from tfdist.elastic.step_transactions import NOTHING, WrittenVariables
from tfdist.elastic.step_variables import accumulates, accumulation_counts, accumulators_of, check_updates
from tfdist.membership.decisions import View
from tfdist.strategies import exchange_start
from tfdist.training.metric_totals import MetricTotals

_ACCUMULATION = "_tfdist_elastic_accumulation"
_TRACE = "_tfdist_elastic_trace"
_REFUSED = {
    "communication_options": "NCCL has a fixed group of workers",
    "overlap_steps": "an exchange in the background belongs to no step, so it cannot be taken back with one",
    "shard_optimizer_state": "the parts of a lost worker would be lost with it",
    "shard_weights": "the parts of a lost worker would be lost with it",
}


def check_elastic_options(**options: Any) -> None:
    """Refuses arguments of the strategy that do not work with `elastic`; those are given that are in use.

    Raises:
        ValueError: One is.
    """
    for name, value in options.items():
        if value:
            raise ValueError(
                f"`{name}` does not work with `elastic`: {_REFUSED[name]}. Received: {name}={value!r} for a "
                "MultiWorkerMirroredStrategy with `elastic=True`, or under `tfdist run --elastic`. Expected: one of "
                f"the two. Leave `{name}` out, or start the run with `--max-restarts` in place of `--elastic`."
            )


class ElasticTraining:
    """The steps of a strategy whose workers may be lost, and the callbacks that its `fit` has.

    Args:
        strategy: It divides rows by its `row_shares`, and keeps `metric_totals`.

    Raises:
        ValueError: The workers have different numbers of devices.
    """

    def __init__(self, strategy: Any) -> None:
        counts = strategy.replicas_of_workers
        if len(set(counts)) > 1:
            raise ValueError(
                "Elastic workers have equally many devices: each may take the state of each other one. Received: "
                f"{list(counts)} devices, by rank. Expected: equal numbers. Set the logical or visible devices of all "
                "workers alike."
            )
        self._row_shares, self._strategy = strategy.row_shares, weakref.ref(strategy)
        self._transactions = exchange_start.step_transactions()
        self._group = self._transactions.group
        self.metric_totals = MetricTotals()
        self._has_totals = True  # whether the last step has stored the sums of metrics over all workers
        self.coordination = ElasticCoordination(self._transactions, self._divide_metrics, self._view_of_sums)
        patch_epoch_iterator()
        membership = self._group.membership
        if self.starts_late or self.living_ranks:
            self._row_shares.give_rows_to([membership.number] if self.starts_late else membership.view.members)
        else:
            self._take_no_rows()
        self._transactions.tell(self)

    @property
    def common_state(self) -> Any:
        """The shares of the workers, which are equal on all."""
        return self._row_shares.state

    @property
    def starts_late(self) -> bool:
        """Whether this worker has started while the others train, and does not train with them yet."""
        return self._transactions.is_alone

    @property
    def living_ranks(self) -> tuple[int, ...]:
        """The ranks of the workers that train; none while this one does not train with them."""
        return tuple(self._group.membership.ranks(self._group.membership.view))

    @property
    def _is_local(self) -> bool:
        """Whether workers train by themselves between two exchanges of weights."""
        strategy: Any = self._strategy()
        return strategy.local_updates is not None

    def run_alone(self, exchange: Callable[[], Any]) -> Any:
        """Returns the result of exchanges outside of a step: all of them before a change of the workers, or after."""
        return self._transactions.run_alone(exchange) if tf.executing_eagerly() else exchange()

    @property
    def ranks_by_age(self) -> list[int]:
        """The ranks of the workers that train, the oldest first."""
        view, ranks = self._group.connected_view, len(self._group.addresses)
        return [number % ranks for number in view.members]

    def check_runs_in_step(self) -> None:
        """Refuses replicas outside of steps.

        Raises:
            ValueError: No step of `fit`, `evaluate`, `predict` or an `ElasticLoop` is running.
        """
        if not self._transactions.is_running:
            raise ValueError(
                "An elastic strategy takes back what a step has written when a worker is lost, so it must know all of "
                "it. Received: `strategy.run` outside of the steps of `fit`, `evaluate`, `predict` and `ElasticLoop`. "
                "Expected: a call within one. Decorate the function that calls it with the `step` of a "
                "`tfdist.strategies.ElasticLoop`, train by `model.fit`, or create the strategy without `elastic`."
            )

    def write_late(self) -> None:
        """Lets the training step whose graph is being traced write when it counts."""
        self._transactions.commit_before_writes()

    def leave(self) -> None:
        """Leaves the other workers, which train on."""
        self._group.close()

    def loop_member(self, objects: Any) -> LoopMember:
        """Returns what runs the steps of a custom loop, which write certain objects: see `LoopState`.

        Raises:
            ValueError: Workers train by themselves, or see `LoopState`.
        """
        transactions = self._transactions
        if self._is_local:
            raise ValueError(
                "Custom loops whose workers may be lost exchange gradients in each step. Received: an ElasticLoop "
                "under a strategy with `elastic` and `mode=LocalSGD(...)` or `DiLoCo(...)`. Expected: one of the two. "
                "Train by `model.fit`, or leave `mode` out."
            )
        return LoopMember(
            transactions,
            LoopState(objects, self._strategy(), self.metric_totals, transactions.sum_over_workers),
            others=lambda: [self._row_shares.state],
            overwritten=lambda: self.metric_totals.variables,
            take_no_rows=self._take_no_rows,
            share_metrics=self._share_metrics,
        )

    def fit_callbacks(self) -> list[Any]:
        """Returns the callback that `fit` has besides those of the user."""
        return [ElasticFit(self._transactions, self.coordination, self._trace_step, self._has_state_of_another)]

    def run_update(self, model: Any, update: Callable[[], None]) -> None:
        """Applies what the optimizer of a model has accumulated, on all workers or on none."""
        if self._is_local:
            self._transactions.run(update, self._written_by(model))
        else:
            self._accumulation_of(model).run(update)

    def run_writing(self, update: Callable[[], None], find: Callable[[], Sequence[Any]]) -> None:
        """Calls `update`, which writes the `tf.Variable`s that `find` returns, on all workers or on none."""
        self._transactions.run(update, WrittenVariables(find))

    def step_function(
        self, model: Any, name: str, function: Callable[[Any], Any], trace: Callable[[Any], None] | None = None
    ) -> Callable[[Any], Any]:
        """Returns a function that runs a step of the model on a batch: it counts on all workers or on none.

        Args:
            model: The model.
            name: "train", "test" or "predict".
            function: Runs the step on a batch. It is called again if a worker is lost meanwhile.
            trace: Traces its graph for batches of a structure of `tf.TypeSpec`s.
        """
        if name == "predict":
            return lambda data: self._transactions.run(lambda: function(data), NOTHING)
        if name == "train":
            check_updates(model)
        run: Callable[[Callable[[], Any]], Any]
        if name == "train" and accumulates(model):
            written: Any = self._accumulation_of(model, is_new=True)
            run = written.run
        else:
            written = self._written_by(model)
            run = functools.partial(self._transactions.run, written=written)
        has_totals = name != "train" or not self._is_local
        if name == "train" and trace is not None:
            # Bypasses Keras' tracking of attributes.
            object.__setattr__(model, _TRACE, lambda spec: self._transactions.trace(lambda: trace(spec), written))

        def run_step(batch: Any) -> Any:
            self._has_totals = has_totals
            return run(lambda: function(batch))

        return run_step

    def follow(self, workers: Sequence[int]) -> None:
        """Other workers train than before: those of these numbers."""
        self._row_shares.give_rows_to(workers)
        self._share_metrics()

    def _share_metrics(self) -> None:
        # The oldest: one that joins may not have stored all sums.
        self._divide_metrics(self._group.rank == self.ranks_by_age[0])

    def _divide_metrics(self, is_first: bool) -> None:
        if self._has_totals:
            self.metric_totals.divide(is_first=is_first)

    def _accumulation_of(self, model: Any, *, is_new: bool = False) -> ElasticAccumulation:
        """Returns the accumulation of a model, for the next function of its steps if `is_new`."""
        found: ElasticAccumulation | None = getattr(model, _ACCUMULATION, None)
        if found is None:
            found = ElasticAccumulation(
                self._transactions, lambda: accumulation_counts(model), shares=self._row_shares.state
            )
            object.__setattr__(model, _ACCUMULATION, found)  # bypasses Keras' tracking of attributes
            is_new = True
        if is_new:
            found.use(self._written_by(model), Accumulators(lambda: accumulators_of(model)))
        return found

    def _view_of_sums(self, model: Any) -> View | None:
        return self._accumulation_of(model).view_of_sums if accumulates(model) else None

    def _written_by(self, model: Any) -> WrittenVariables:
        strategy: Any = self._strategy()
        written: WrittenVariables = strategy.written_variables(model)
        return written

    def _trace_step(self, model: Any, element_spec: Any) -> None:
        getattr(model, _TRACE)(element_spec)

    def _has_state_of_another(self, model: Any) -> None:
        self._take_no_rows()
        if accumulates(model):
            self._accumulation_of(model).has_state_of_another()

    def _take_no_rows(self) -> None:
        self._row_shares.take_no_rows()
        self._divide_metrics(False)
