"""How a training gets on, as curves in TensorBoard that a restart does not break."""

import itertools
import os
from typing import Any

import keras

from tfdist.callbacks.event_log import EventLog
from tfdist.callbacks.failure_recovery import FailureRecovery
from tfdist.callbacks.monitored import (
    DESCRIPTIONS,
    Communication,
    PushingWorkers,
    ResidualNorm,
    SaveStalls,
    Scalars,
    Source,
    StepTimes,
    World,
)
from tfdist.callbacks.neighbours import callbacks_beside
from tfdist.callbacks.restart_count import RestartCount, attempt_of_run, run_id
from tfdist.callbacks.timing import begin_timing, end_timing

_PREFIX = "tfdist/"
_DESCRIPTIONS = {_PREFIX + name: text for name, text in DESCRIPTIONS.items()}
_made = itertools.count()


class TrainingMonitor(keras.callbacks.Callback):
    """Writes what tfdist measures of a training for TensorBoard, over the training steps.

    Beside `keras.callbacks.TensorBoard`, which writes losses and metrics, and with the same `log_dir`: this callback
    writes to the runs `tfdist` and, under parameter servers, `tfdist/worker-0` and so on. Only the chief writes, and
    only what there is something to tell of:

    - `tfdist/wire_bytes` and `tfdist/dense_bytes`: what the chief's first replica sent of gradients for an update, and
      would have sent uncompressed; `tfdist/compression_ratio`: the second divided by the first;
    - `tfdist/residual_norm`: global L2 norm of what error feedback keeps back on that replica;
    - `tfdist/step_ms`: of a training step, with its data, without callbacks and validation;
    - with `timing`, `tfdist/encode_ms`, `tfdist/exchange_ms` and `tfdist/decode_ms`: of an update, as
      `CommunicationReport` takes them;
    - `tfdist/checkpoint_stall_ms`: how long a save of `FailureRecovery` held the training up;
    - `tfdist/restarts`: how often the training was started again;
    - `tfdist/world_size`: the workers; `tfdist/replicas`: those that share a batch;
    - of each worker of parameter servers, `tfdist/samples_per_second`, `tfdist/staleness`, `tfdist/bytes_pushed` and
      `tfdist/bytes_pulled`, the last three by its steps.

    A point tells of the steps since the one before. The first step of a process, which is traced, does not count for
    `step_ms`. With `FailureRecovery` in the list the curves go on where the checkpoint was made: what was written of
    steps that are made again is taken out of the files. Without it the steps of several calls of `fit` are counted on.

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
    ...     os.listdir(log_dir)  # to be opened by: tensorboard --logdir ...
    ['tfdist']
    """

    def __init__(self, log_dir: str | os.PathLike[str], *, every_steps: int = 10, timing: bool = False) -> None:
        """Describes where and how often to write.

        Args:
          log_dir: of this training alone; made where it is missing.
          every_steps: a point is written after every so many training steps (micro-steps, with gradient accumulation),
            and at the end of training.
          timing: whether the times of the exchange are taken, which puts clocks into the training step; see
            `CommunicationReport`.

        Raises:
          ValueError: `every_steps` is no number of steps.
        """
        super().__init__()
        if isinstance(every_steps, bool) or not isinstance(every_steps, int) or every_steps < 1:
            raise ValueError(
                f"`every_steps` is no interval. Received: every_steps={every_steps!r}. Expected: a whole number of at "
                "least 1, such as 10."
            )
        self._directory, self._every, self.takes_times = os.path.join(os.fspath(log_dir), "tfdist"), every_steps, timing
        # The same in all attempts of a run that make their monitors in the same order.
        self._training = f"{run_id()}-{next(_made)}"
        self._restarts = RestartCount()
        self._step = 0
        self._logs: dict[str, EventLog] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        strategy = self.model.distribute_strategy
        self._close()  # of a `fit` that an exception has ended
        if self.takes_times:
            begin_timing(self)
        self._writes = bool(strategy.extended.should_save_summary)
        # Whatever an earlier attempt has written and no checkpoint holds is made again.
        self._forget_after = 0 if attempt_of_run() and not self._step else None
        self._times = StepTimes()
        if self._writes:
            recoveries = [other for other in callbacks_beside(self) if isinstance(other, FailureRecovery)]
            stalls = SaveStalls(recoveries[0] if recoveries else None)
            self._sources: list[Source] = [Communication(strategy), ResidualNorm(strategy), stalls, World(strategy)]
            self._workers = PushingWorkers(strategy)
        self._written = self._step

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._first_batch = batch
        self._times.begin()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        steps = batch + 1 - self._first_batch
        self._times.end(steps)
        before, self._step = self._step, self._step + steps
        if self._step // self._every != before // self._every:
            self._write()

    def on_train_end(self, logs: Any = None) -> None:
        if self._step > self._written:
            self._write()
        self._close()
        if self.takes_times:
            end_timing(self)

    def get_state(self) -> dict[str, Any]:
        """How far the curves have come, for `FailureRecovery`."""
        return {"step": self._step, "training": self._training, **self._restarts.state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on with curves that another process may have begun."""
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
