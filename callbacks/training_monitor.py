"""TrainingMonitor: writes training metrics to TensorBoard; curves continue across restarts."""

import functools
import itertools
import os
import secrets
from typing import Any

from tfdist.callbacks.exchange_timing import ExchangeTimingCallback
from tfdist.callbacks.failure_recovery import FailureRecovery
from tfdist.callbacks.scalar_sources import (
    DESCRIPTIONS,
    ClusterSize,
    CommunicationScalars,
    ParameterServerWorkers,
    ResidualNorm,
    SaveStalls,
    Scalars,
    ScalarSource,
    StepTimes,
)
from tfdist.callbacks.strategy_support import check_strategies_early
from tfdist.callbacks.tensorboard_events import EventLog
from tfdist.keras_internals.epoch_iterator import last_step
from tfdist.utils.argument_checks import check_whole_number


class RestartCount:
    """Counts the restarts of a training.

    Every restart by `tfdist run` counts. A start by hand counts if it resumes from a checkpoint: otherwise it is a new
    training.

    >>> count = RestartCount()
    >>> count.resume({"restarts": 2, "run": "an earlier run", "attempt": 1})
    >>> count.number - current_attempt()
    3
    """

    def __init__(self) -> None:
        self._before = 0  # restarts before this `tfdist run`, or before this process

    @property
    def number(self) -> int:
        """The number of restarts so far."""
        return self._before + current_attempt()

    def state(self) -> dict[str, Any]:
        """Returns the argument of `resume`, as JSON."""
        return {"restarts": self.number, "run": run_id(), "attempt": current_attempt()}

    def resume(self, state: dict[str, Any]) -> None:
        """Continues from the state in a checkpoint."""
        is_same_run = state["run"] == run_id()
        self._before = state["restarts"] - state["attempt"] if is_same_run else state["restarts"] + 1


def current_attempt() -> int:
    """Returns the attempt of `tfdist run` to which this process belongs, from 0; 0 under other launchers."""
    return int(os.environ.get("TFDIST_ATTEMPT", "0"))


@functools.cache
def run_id() -> str:
    """Returns an id that all attempts of one `tfdist run` share; under other launchers, an id of this process."""
    return os.environ.get("TFDIST_RUN_ID") or secrets.token_hex(8)


_PREFIX = "tfdist/"
_DESCRIPTIONS = {_PREFIX + name: text for name, text in DESCRIPTIONS.items()}
_numbers = itertools.count()


class TrainingMonitor(ExchangeTimingCallback):
    """Writes tfdist's measurements of a training to TensorBoard, over the training steps.

    It complements `keras.callbacks.TensorBoard`, which writes losses and metrics, and takes the same `log_dir`. It
    writes to the runs `tfdist` and, under parameter servers, `tfdist/worker-0` and so on. Only the chief writes. A
    scalar that does not apply is left out:

    - `tfdist/wire_bytes` and `tfdist/dense_bytes`: bytes of gradients that the chief's first replica sent per update,
      and would have sent uncompressed; `tfdist/compression_ratio`: the second divided by the first;
    - `tfdist/residual_norm`: global L2 norm of the residuals of error feedback on that replica;
    - `tfdist/step_ms`: duration of a training step with its data, without callbacks and validation;
    - with `timing`, `tfdist/encode_ms`, `tfdist/exchange_ms` and `tfdist/decode_ms`: durations per update, as
      `CommunicationReport` measures them;
    - `tfdist/checkpoint_stall_ms`: how long a save of `FailureRecovery` stalled the training;
    - `tfdist/restarts`: number of restarts of the training;
    - `tfdist/world_size`: number of workers; `tfdist/replicas`: number of replicas that share a batch;
    - for each worker of a parameter server strategy, `tfdist/samples_per_second`, and `tfdist/staleness`,
      `tfdist/bytes_pushed` and `tfdist/bytes_pulled` per step of that worker.

    A point covers the steps since the previous point. The first step of a process traces the model and does not count
    in `step_ms`. With `FailureRecovery` in the list of callbacks the curves continue where the checkpoint was saved:
    points of steps that are computed again are removed from the files. Without it the steps of several calls of `fit`
    are counted together.

    >>> import keras, numpy as np, os, tempfile
    >>> from tfdist.callbacks import TrainingMonitor
    >>> from tfdist.strategies import MirroredStrategy
    >>> with MirroredStrategy(["CPU:0", "CPU:1"], compression="int8").scope():
    ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32)])
    ...     model.compile("sgd", loss="mse")
    >>> inputs, targets = np.ones([40, 64], "float32"), np.ones([40, 32], "float32")
    >>> with tempfile.TemporaryDirectory() as log_dir:
    ...     monitor = TrainingMonitor(log_dir, every_steps=5)
    ...     history = model.fit(inputs, targets, batch_size=4, verbose=0, callbacks=[monitor])
    ...     os.listdir(log_dir)  # view it with: tensorboard --logdir ...
    ['tfdist']
    """

    def __init__(self, log_dir: str | os.PathLike[str], *, every_steps: int = 10, timing: bool = False) -> None:
        """Creates the callback.

        Args:
            log_dir: Directory of this training, created if missing.
            every_steps: Writes a point after this many training steps (micro-steps, with gradient accumulation), and at
                the end of training.
            timing: Whether to measure the durations of the gradient exchange, which adds clock readings to the training
                step; see `CommunicationReport`.

        Raises:
            ValueError: If `every_steps` is not a whole number of at least 1.
        """
        super().__init__()
        check_whole_number("every_steps", every_steps, at_least=1, example=10)
        self._directory, self._every, self.timing = os.path.join(os.fspath(log_dir), "tfdist"), every_steps, timing
        # All attempts of a run that create their monitors in the same order get the same name.
        self._training = f"{run_id()}-{next(_numbers)}"
        self._restarts = RestartCount()
        self._step = 0
        self._logs: dict[str, EventLog] = {}
        check_strategies_early()

    def on_train_begin(self, logs: Any = None) -> None:
        strategy = self.model.distribute_strategy
        self._close()  # files of a `fit` that raised
        self.begin_timing()
        self._writes = bool(strategy.extended.should_save_summary)
        # Steps of an earlier attempt that are in no checkpoint are computed again.
        self._forget_after = 0 if current_attempt() and not self._step else None
        self._times = StepTimes()
        if self._writes:
            recoveries = [other for other in self.neighbours if isinstance(other, FailureRecovery)]
            stalls = SaveStalls(recoveries[0] if recoveries else None)
            self._sources: list[ScalarSource] = [
                CommunicationScalars(strategy),
                ResidualNorm(strategy),
                stalls,
                ClusterSize(strategy),
            ]
            self._workers = ParameterServerWorkers(strategy)
        self._written = self._step

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._first_batch = batch
        self._times.begin()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        steps = last_step(self.model, batch) + 1 - self._first_batch
        self._times.end(steps)
        before, self._step = self._step, self._step + steps
        if self._step // self._every != before // self._every:
            self._write()

    def on_train_end(self, logs: Any = None) -> None:
        if self._step > self._written:
            self._write()
        self._close()
        self.end_timing()

    def get_state(self) -> dict[str, Any]:
        """Returns the position of the curves, for `FailureRecovery`."""
        return {"step": self._step, "training": self._training, **self._restarts.state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues curves that another process may have begun."""
        self._step = self._written = self._forget_after = state["step"]
        self._training = state["training"]
        self._restarts.resume(state)

    def _write(self) -> None:
        self._written = self._step
        if not self._writes:
            return
        seconds = self._times.seconds
        scalars = {"restarts": float(self._restarts.number), **self._times.scalars()}
        for source in self._sources:
            scalars |= source.scalars()
        self._append("", scalars)
        for number, of_worker in enumerate(self._workers.scalars(seconds)):
            if of_worker:
                self._append(f"worker-{number}", of_worker)

    def _append(self, run: str, scalars: Scalars) -> None:
        if run not in self._logs:
            directory = os.path.join(self._directory, run) if run else self._directory
            self._logs[run] = EventLog(directory, self._training, forget_after=self._forget_after)
        self._logs[run].write(self._step, {_PREFIX + name: number for name, number in scalars.items()}, _DESCRIPTIONS)

    def _close(self) -> None:
        for log in self._logs.values():
            log.close()
        self._logs = {}
