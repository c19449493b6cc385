"""Handles preemption: signals and requests, after which all workers save and exit, and notices of Ray Train.

Ray Train decides what follows its notice that a node will be lost: a training function that returns has finished, one
that fails counts for `FailureConfig.max_failures`, and what still trains when the node is lost is restarted on other
nodes, which counts for `max_preemption_failures`. So a training saves after a notice, and does not exit.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NoReturn

from tfdist.keras_internals.keras_callbacks import open_files
from tfdist.recovery.save_schedule import SaveInterval, SaveSchedule
from tfdist.recovery.worker_coordination import WorkerCoordination

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # Slurm sends SIGUSR1 with `--signal=USR1@60`
# A scheduler may signal every process while the supervisor forwards its own signal; both are one notice.
SAME_NOTICE_SECONDS = 1.0
_STOP_STEP, _CLOSED = "stop", "closed"  # a key, and its value if training ends without a preemption
_SECONDS_BETWEEN_QUESTIONS = 5.0  # as often as Ray Train itself asks for nodes that are drained
_log = logging.getLogger("tfdist")


class PreemptionHandler:
    """Receives signals and requests on any worker and finds the next step that all workers have in common.

    The signalled worker proposes the step after its current one and continues only when all workers know it. The
    workers of a synchronous training wait for each other in every step, so none can have passed that step.

    TensorFlow's coordination service swallows SIGTERM, so the handlers must be set after the strategy is created. A
    second signal, at least a second after the first, ends the process at once. If an exception has ended `fit`, a
    signal has its previous effect. A signal that arrives too late to end a `fit` ends the next one.
    """

    _pending_since: float | None = None  # when a signal asked this process to exit; None once it has begun to

    def __init__(
        self,
        coordination: WorkerCoordination,
        is_in_fit: Callable[[FrameType | None], bool] | None = None,
        requested: threading.Event | None = None,
    ) -> None:
        """Handles nothing until `listen`, and no signals until `install`.

        `is_in_fit` returns whether `fit` called the frame that a signal interrupts; None: every frame counts. Any
        thread may set `requested`, before or during the training, to make all workers exit.
        """
        self._coordination, self._is_in_fit = coordination, is_in_fit
        self._signalled = threading.Event() if requested is None else requested
        self._signalled_at = 0.0
        self._stop_step: int | None = None
        self._previous: dict[int, Any] = {}

    def listen(self) -> None:
        """Listens to other workers. All workers call this before they train."""
        if self._coordination.num_workers > 1:
            threading.Thread(target=self._wait_for_proposal, name="tfdist-preemption", daemon=True).start()

    def install(self) -> bool:
        """Sets the handlers. Returns whether they are set: only the main thread can set them."""
        can_handle = threading.current_thread() is threading.main_thread()
        if can_handle:
            self._previous = {number: _outside_fit(number, signal.signal(number, self._handle)) for number in _SIGNALS}
            if PreemptionHandler._pending_since is not None:
                self._signalled_at = PreemptionHandler._pending_since
                self._signalled.set()
        return can_handle

    def is_due(self, step: int) -> bool:
        """Returns whether to save and exit after `step`. All workers must ask after every step."""
        if self._signalled.is_set() and self._stop_step is None:
            self._propose(step)
        return self._stop_step is not None and step >= self._stop_step

    def uninstall(self) -> None:
        """Restores the previous handlers unless others were set since."""
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def mark_exiting(self) -> None:
        """Notes that the process begins to exit as it was asked to."""
        PreemptionHandler._pending_since = None
        self._signalled.clear()
        if self._coordination.num_workers == 1:
            self.uninstall()

    def close(self) -> None:
        """Ends the listening threads. All workers call this when the training is over."""
        if self._coordination.num_workers > 1 and self._coordination.rank == 0:
            self._coordination.propose(_STOP_STEP, _CLOSED)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_in_fit is not None and not self._is_in_fit(frame):
            self.uninstall()
            os.kill(os.getpid(), number)
            return
        now = time.monotonic()
        if not self._signalled.is_set():
            self._signalled_at = PreemptionHandler._pending_since = now
            self._signalled.set()
        elif now > self._signalled_at + SAME_NOTICE_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _propose(self, step: int) -> None:
        if self._coordination.num_workers == 1:
            self._stop_step = step
            return
        agreed = self._coordination.propose(_STOP_STEP, step + 1)  # or the first later step at which they ask
        if agreed == _CLOSED:
            self._signalled.clear()
            return
        self._coordination.wait_for_all("heard")  # the threads below answer, also that of this worker

    def _wait_for_proposal(self) -> None:
        try:
            agreed = self._coordination.wait_for(_STOP_STEP)
        except Exception:  # the cluster has shut down
            return
        if agreed != _CLOSED:
            self._stop_step = int(agreed)
            self._coordination.arrive("heard")


def _outside_fit(number: int, handler: Any) -> Any:
    """Returns `handler`, or the handler it replaced if it belongs to a `fit` that an exception has ended."""
    owner = getattr(handler, "__self__", None)
    return owner._previous.get(number, signal.SIG_DFL) if isinstance(owner, PreemptionHandler) else handler


def exit_process(exit_code: int, callbacks: Iterable[Any], *, is_alone: bool) -> NoReturn:
    """Flushes the files of `callbacks` and ends this process.

    Keras does not call `on_train_end` of the callbacks: the training is not over.
    """
    for file in (file for callback in callbacks for file in open_files(callback)):
        try:
            file.flush()
        except Exception as error:
            _log.warning("FailureRecovery: the output of a callback may be incomplete: %s", error)
    if is_alone:
        raise SystemExit(exit_code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


class RayTrainNotices:
    """Asks Ray Train every few seconds, on all workers after the same step, because its answer is a barrier.

    Attributes:
        are_given: Whether this training runs in workers of Ray Train, which get notices.
    """

    def __init__(self, question: Callable[[], Any] | None, coordination: WorkerCoordination, step: int) -> None:
        """Begins at `step`, the number of steps since the training began.

        `question` is `ray.train.get_preemption_info`, which returns None or a notice, the same to all workers; None
        where nobody gives notices. Nothing else uses `coordination`.
        """
        self.are_given = question is not None
        self._question, self._is_chief = question, coordination.rank == 0
        self._schedule = SaveSchedule(SaveInterval(seconds=_SECONDS_BETWEEN_QUESTIONS), coordination, step)
        self._known: Any = None

    @staticmethod
    def of_this_worker(rank: int, num_workers: int, step: int) -> "RayTrainNotices":
        """Returns the notices to this process. None are given unless Ray Train's workers are those of this training."""
        is_in_ray_train = _ray_train_world_size() == num_workers
        question = sys.modules["ray.train"].get_preemption_info if is_in_ray_train else None
        return RayTrainNotices(question, WorkerCoordination(rank, num_workers), step)

    def is_due(self, step: int) -> bool:
        """Returns whether to save after `step`. All workers must ask after every step, and get the same answer."""
        if self._question is None or not self._schedule.is_due(step):
            return False
        self._schedule.saved()  # the schedule is that of the questions
        notice = self._question()
        if notice is None or notice == self._known:
            return False
        self._known = notice
        if self._is_chief:
            _log.warning("FailureRecovery saves after step %d: %s", step, _described(notice))
        return True


def _ray_train_world_size() -> int:
    """Returns the number of Ray Train's workers; 0 outside of them, or if this version of Ray gives no notices."""
    train = sys.modules.get("ray.train")  # imported in every worker of Ray Train
    if train is None or not hasattr(train, "get_preemption_info"):
        return 0
    try:
        return int(train.get_context().get_world_size())
    except (RuntimeError, DeprecationWarning):  # not in a worker of Ray Train, or in a trial of Ray Tune
        return 0


def _described(notice: Any) -> str:
    nodes, ranks = ", ".join(notice.preempted_node_ids), ", ".join(map(str, notice.preempted_ranks))
    deadline = notice.deadline_ms
    when = "soon" if deadline is None else f"in {max(0.0, deadline / 1000 - time.time()):.0f} s"
    return (
        f"Ray Train will lose the nodes {nodes}, with the ranks {ranks}, {when}. Training continues until Ray Train "
        "restarts it on other nodes."
    )
