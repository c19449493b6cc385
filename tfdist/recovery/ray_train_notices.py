"""Notices of Ray Train that a node of this training will be lost: all workers save, and train until Ray restarts them.

Ray Train decides what follows a notice: a training function that returns has finished, one that fails counts for
`FailureConfig.max_failures`, and what still trains when the node is lost is restarted on other nodes, which counts for
`max_preemption_failures`. So a training saves, and does not exit.
"""

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from tfdist.recovery.save_schedule import SaveInterval, SaveSchedule
from tfdist.recovery.worker_coordination import WorkerCoordination

_SECONDS_BETWEEN_QUESTIONS = 5.0  # as often as Ray Train itself asks for nodes that are drained
_log = logging.getLogger("tfdist")


class RayTrainNotices:
    """Asks Ray Train every few seconds, on all workers after the same step, because its answer is a barrier.

    Attributes:
        are_given: Whether this training runs in workers of Ray Train, which get notices.
    """

    def __init__(
        self,
        question: Callable[[], Any] | None,
        coordination: WorkerCoordination,
        step: int,
        *,
        seconds_between_questions: float = _SECONDS_BETWEEN_QUESTIONS,
    ) -> None:
        """Begins at `step`, the number of steps since the training began.

        Args:
            question: `ray.train.get_preemption_info`: returns None or a notice, the same to all workers. None where
                nobody gives notices.
            coordination: The coordination between the workers, used by nothing else.
            step: The number of steps since the training began.
            seconds_between_questions: How often to ask.
        """
        self.are_given = question is not None
        self._question, self._is_chief = question, coordination.rank == 0
        self._schedule = SaveSchedule(SaveInterval(seconds=seconds_between_questions), coordination, step)
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
