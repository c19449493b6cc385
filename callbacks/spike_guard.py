"""SpikeGuard: takes back training steps whose loss or gradient norm jumps."""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.callbacks.spike_statistics import RunningStatistics, SpikeLimit
from tfdist.callbacks.strategy_support import check_equal_replicas, check_strategies_early
from tfdist.data_position.resumable_iterator import patch_epoch_iterator
from tfdist.keras_internals.model_state import OptimizerState, has_compiled_parts, optimizers_of
from tfdist.keras_internals.running_fit import running_fit
from tfdist.training.step_guard import StepFunction, StepValues
from tfdist.training.strategy_kinds import describe_strategy
from tfdist.training.strategy_protocol import is_tfdist_strategy, training_strategy
from tfdist.utils.argument_checks import check_whole_number, is_number

_log = logging.getLogger("tfdist")
_MOST_KEPT = 1000  # spikes in the attribute


@dataclass(frozen=True)
class Spike:
    """A training step that was taken back.

    Attributes:
        epoch: Its epoch, from 0.
        batch: Its batch in the epoch, from 0.
        name: What has jumped: "loss" or "gradient norm".
        value: Its value, over all replicas.
        limit: What it would have been at most; infinity during the warm-up, when only finite values are required.
        steps_back: How many earlier steps were taken back with it.
    """

    epoch: int
    batch: int
    name: str
    value: float
    limit: float
    steps_back: int = 0


class SpikeError(RuntimeError):
    """Too many training steps in a row have jumped, or one that cannot be taken back. `spike` is the last one."""

    def __init__(self, message: str, spike: Spike) -> None:
        super().__init__(message)
        self.spike = spike


class SpikeGuard(keras.callbacks.Callback):
    """Takes back a training step whose loss or gradient norm jumps, as if its batch did not exist.

    A step has jumped if its loss, or the norm of its gradients before clipping, is not finite, or above `max(mean +
    deviations * standard deviation, factor * mean)` of the last `window` steps that count, unless these were equal.
    Then nothing of the step remains: weights, slots, counters, metrics, batch statistics, averages, seeds and states of
    compressors are those before it, and `fit` continues with the next batch. The values are those of the global batch,
    bit-identical on all workers, so all take back the same steps. The loss is that of the log "loss", for this batch
    alone: a model with a separate `train_step` has it if it logs its loss as "loss"; otherwise the norm alone counts.

    Each step that jumps is logged by one worker as a warning, appended to `spikes`, and given to `on_spike`. Callbacks
    see its batch with the logs of the step before. `FailureRecovery` saves the statistics, and workers that join an
    elastic training get them.

    It works under `MirroredStrategy` and `MultiWorkerMirroredStrategy`, elastic or not, also with one device; not with
    `shard_optimizer_state`, `LocalSGD`, `DiLoCo`, or `gradient_accumulation_steps`, whose accumulators would keep the
    gradients of earlier batches. With a `LossScaleOptimizer` gradients that overflow only lower the scale, as without
    this callback. The values before a step are kept, so that an update takes new memory: variables of the model and the
    optimizer need up to twice their memory during a step, with `go_back_steps` up to four times. Steps run one after
    another, also with `steps_per_execution`.

    The limit by standard deviations is that of `SkipStepOptimizer` in OLMo-core
    (<https://github.com/allenai/OLMo-core>). To go back follows PaLM, which resumed about 100 steps before a spike and
    left out 200 to 500 batches ([Chowdhery et al. 2022](https://arxiv.org/abs/2204.02311), section 5.1).

    >>> import keras, numpy as np
    >>> from tfdist.callbacks import SpikeGuard
    >>> from tfdist.strategies import MirroredStrategy
    >>> with MirroredStrategy(["CPU:0"]).scope():
    ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", loss="mse")
    >>> targets = np.ones([8, 1], "float32")
    >>> targets[5] = np.nan
    >>> guard = SpikeGuard()
    >>> history = model.fit(np.ones([8, 1]), targets, batch_size=2, shuffle=False, verbose=0, callbacks=[guard])
    >>> guard.spikes
    [Spike(epoch=0, batch=2, name='loss', value=nan, limit=inf, steps_back=0)]
    >>> int(model.optimizer.iterations), bool(np.isfinite(history.history["loss"][0]))
    (3, True)

    Attributes:
        spikes: The last 1000 steps that were taken back in this training, as `Spike`s.
    """

    def __init__(
        self,
        *,
        deviations: float = 6.0,
        factor: float = 1.0,
        window: int = 128,
        warm_up: int | None = None,
        go_back_steps: int | None = None,
        most_in_a_row: int = 10,
        on_spike: Callable[[Spike], None] | None = None,
    ) -> None:
        """Creates the callback.

        Args:
            deviations: How many standard deviations above the mean a value may be.
            factor: How many times the mean a value may be, if that is more. Values below 0 are not limited by it.
            window: Of how many steps that count mean and standard deviation are.
            warm_up: How many steps must count before there is a limit. By default half of the window.
            go_back_steps: If given, weights, optimizer, batch statistics and states of compressors are set back
                further: to those between this number of steps and twice of it before the spike, of which two copies
                are kept in memory. Metrics and the position in the data are not: the batches of these steps are not
                repeated. Not with `elastic`, as a worker that joins has no earlier states.
            most_in_a_row: How many steps in a row may jump. After more, `fit` raises `SpikeError`.
            on_spike: Called on each worker with the `Spike`.

        Raises:
            ValueError: An argument is invalid.
        """
        super().__init__()
        check_whole_number("window", window, at_least=1)
        warm_up = max(window // 2, 1) if warm_up is None else warm_up
        check_whole_number("warm_up", warm_up, at_least=1)
        if warm_up > window:
            raise ValueError(
                f"Invalid `warm_up`. Received: warm_up={warm_up}, window={window}. Expected: at most `window`, as no "
                "more steps are kept."
            )
        check_whole_number("most_in_a_row", most_in_a_row, at_least=0)
        if go_back_steps is not None:
            check_whole_number("go_back_steps", go_back_steps, at_least=1)
        for name, number in (("deviations", deviations), ("factor", factor)):
            if not is_number(number, at_least=0):
                raise ValueError(
                    f"Invalid `{name}`. Received: {name}={number!r}. Expected: a finite number of at least 0."
                )
        self._limit = SpikeLimit(window, warm_up, float(deviations), float(factor))
        self._go_back_steps, self._most_in_a_row, self._on_spike = go_back_steps, most_in_a_row, on_spike
        self._begin()
        patch_epoch_iterator()
        check_strategies_early()

    def _begin(self) -> None:
        self.values, self._statistics = StepValues(), RunningStatistics(self._limit)
        self.spikes: list[Spike] = []
        self._in_a_row = self._epoch = self._batch = self._counted = 0
        self._logs: Any = None  # of the last step that counts in this epoch
        self._before: Any = ()  # the values before the present step
        self._kept: list[tuple[int, Any]] = []  # earlier states, by the number of steps that counted then

    def get_state(self) -> dict[str, Any]:
        """Returns what a restarted training continues with."""
        spikes = [asdict(spike) for spike in self.spikes]
        return {"statistics": self._statistics.state(), "in_a_row": self._in_a_row, "spikes": spikes}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues after the steps of an earlier run."""
        self._statistics.restore(state["statistics"])
        self._in_a_row, self.spikes = state["in_a_row"], [Spike(**spike) for spike in state["spikes"]]

    def on_train_begin(self, logs: Any = None) -> None:
        """Makes `fit` run its steps under this guard.

        Raises:
            ValueError: The strategy, the model or its optimizer does not allow that.
        """
        check_equal_replicas(type(self).__name__, self.model)
        tf_strategy: Any = self.model.distribute_strategy
        if not is_tfdist_strategy(tf_strategy):
            raise ValueError(
                "SpikeGuard needs the steps of a strategy of tfdist, which sum losses and gradients. Received: a model "
                f"created under {describe_strategy(tf_strategy)}. Expected: `tfdist.strategies.MirroredStrategy`, also "
                "for one device. Create the model under it."
            )
        strategy = training_strategy(tf_strategy)
        if self._go_back_steps is not None and strategy.may_lose_workers:
            raise ValueError(
                "A worker that joins an elastic training has no earlier states to go back to. Received: "
                f"go_back_steps={self._go_back_steps}, under a strategy with `elastic`. Expected: no `go_back_steps`. "
                "Leave it out, so that the step alone is taken back."
            )
        fit = running_fit(self.model)
        if fit is None or strategy.step_guard is not None:
            received = "a loop of the program" if fit is None else "another SpikeGuard for the same strategy"
            raise ValueError(
                f"SpikeGuard takes back steps of one `fit`. Received: {received}. Expected: one of them in the "
                "callbacks of `fit`."
            )
        self._begin()
        self._check_updates()
        self._strategy = strategy
        self._written = strategy.written_variables(self.model)
        self._kept_variables = strategy.written_variables(self.model, with_metrics=False)
        strategy.step_guard = self
        fit.on_end(self._end)
        self.model.make_train_function(force=True)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._check_updates()  # `GradientAccumulation` changes them here
        self._epoch, self._logs = epoch, None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._batch = batch

    def before_attempts(self, run: StepFunction) -> StepFunction:
        """See `StepGuard`."""

        def attempt(batch: Any) -> Any:
            self._before = self._written.read()
            return run(batch)

        return attempt

    def after_step(self, run: StepFunction) -> StepFunction:
        """See `StepGuard`."""
        return lambda batch: self._decide(run(batch))

    def _decide(self, logs: Any) -> Any:
        """Returns the logs of the last step that counts: those of the present one, unless it has jumped."""
        values = self.values.read()
        found = self._statistics.spike_in(values)
        batch, self._batch = self._batch, self._batch + 1
        if found is not None:
            self._take_back(batch, *found)
            return tf.nest.map_structure(tf.zeros_like, logs) if self._logs is None else self._logs
        self._statistics.add(values)
        self._in_a_row, self._logs = 0, logs
        self._counted += 1
        if self._go_back_steps is not None and self._counted % self._go_back_steps == 0:
            self._kept = [*self._kept[-1:], (self._counted, self._kept_variables.read())]
        self._before = ()
        return logs

    def _take_back(self, batch: int, name: str, value: float, limit: float) -> None:
        try:
            self._written.take_back(self._before)
        except RuntimeError as error:
            spike = Spike(self._epoch, batch, name, value, limit)
            raise SpikeError(
                "The first training step has jumped, and cannot be taken back. Received: new variables, as of "
                f"compressed gradients, which that step has written, and {_described(spike)}. Expected: a first step "
                "that is finite. See its batch, and begin with a lower learning rate.",
                spike,
            ) from error
        self._before = ()
        spike = Spike(self._epoch, batch, name, value, limit, self._go_back())
        self._in_a_row += 1
        self.spikes = [*self.spikes[1 - _MOST_KEPT :], spike]
        if self._strategy.rank == next(iter(self._strategy.living_ranks), None):
            back = f", with {spike.steps_back} steps before it" if spike.steps_back else ""
            _log.warning("SpikeGuard: a training step is taken back%s: %s", back, _described(spike))
        if self._on_spike is not None:
            self._on_spike(spike)
        if self._in_a_row > self._most_in_a_row:
            raise SpikeError(
                f"More than {self._most_in_a_row} training steps in a row have jumped. Received: "
                f"{_described(spike)}. Expected: steps below the limit. The model has the state before "
                "them. See the data of these batches; lower the learning rate, or raise `deviations`, `factor` or "
                "`most_in_a_row`.",
                spike,
            )

    def _go_back(self) -> int:
        """Sets the model back to an earlier state, if there is one; returns the number of steps that count no more."""
        old_enough = [kept for kept in self._kept if self._counted - kept[0] >= (self._go_back_steps or 0)]
        if not old_enough:
            return 0
        counted, values = old_enough[0]
        self._kept_variables.take_back(values)
        self._kept, steps, self._counted = old_enough[:1], self._counted - counted, counted
        return steps

    def _check_updates(self) -> None:
        """Refuses optimizers whose state is not known completely between two steps."""
        steps = [OptimizerState(optimizer).accumulation_steps for optimizer in optimizers_of(self.model)]
        if max(steps, default=1) > 1:
            raise ValueError(
                "A step that is taken back would leave the gradients of earlier batches in the accumulators. Received: "
                f"an optimizer that accumulates over {max(steps)} micro-steps, with SpikeGuard. Expected: an update in "
                "each step. Use `MultiWorkerMirroredStrategy(micro_batches=...)`, which divides a step, or larger "
                "batches."
            )
        if has_compiled_parts(self.model):
            raise ValueError(
                "The optimizer of a part of a model is not taken back with a step. Received: a compiled model within "
                "the model that is trained, with SpikeGuard. Expected: all optimizers in attributes of the trained "
                "model. Assign them there, and do not compile its parts."
            )

    def _end(self) -> None:
        """Leaves the model to other calls of `fit`, whose steps are traced without this guard."""
        self._strategy.step_guard = None
        self.model.train_function = None
        self.values, self._before, self._kept, self._logs = StepValues(), (), [], None
        del self._written, self._kept_variables, self._strategy


def _described(spike: Spike) -> str:
    return f"{spike.name} {spike.value:g}, limit {spike.limit:g}, in batch {spike.batch} of epoch {spike.epoch}, from 0"
