"""How often to save, and what failures leave of the time of a long training.

Sources: Young 1974, "A first order approximation to the optimum checkpoint interval"; Daly 2006, "A higher order
estimate of the optimum checkpoint interval for restart dumps".
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class FailureCosts:
    """What saves and restarts cost, and how often tasks fail.

    Attributes:
        task_mtbf_seconds: The mean time between two failures of one task.
        save_seconds: How long a save delays the training.
        restart_seconds: From a failure to the next step, without the steps that are computed again.
    """

    task_mtbf_seconds: float
    save_seconds: float
    restart_seconds: float

    def mtbf_seconds(self, tasks: int) -> float:
        """Returns the mean time between two failures of any of `tasks` tasks, each of which ends an attempt.

        >>> FailureCosts(3600.0, 1.0, 10.0).mtbf_seconds(4)
        900.0
        """
        return self.task_mtbf_seconds / tasks


def best_interval_seconds(save_seconds: float, mtbf_seconds: float) -> float:
    """Returns the time of training between two saves that loses the least (Daly 2006, equation 37).

    For saves that are short against the mean time between failures it is Young's `sqrt(2 · save · mtbf)`.

    >>> round(best_interval_seconds(1.0, 5000.0), 1), best_interval_seconds(3.0, 1.0)
    (99.3, 1.0)
    """
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = math.sqrt(save_seconds / (2 * mtbf_seconds))
    return math.sqrt(2 * save_seconds * mtbf_seconds) * (1 + ratio / 3 + ratio**2 / 9) - save_seconds


def goodput(interval_seconds: float, costs: FailureCosts, tasks: int) -> float:
    """Returns the part of the time in which steps are computed that count (Daly 2006, equation 20).

    Failures are exponentially distributed, and may hit saves and restarts.

    >>> round(goodput(100.0, FailureCosts(5000.0, 1.0, 10.0), 1), 4)
    0.9782
    >>> goodput(100.0, FailureCosts(50.0, 1.0, 10.0), 100) < 1e-6
    True
    """
    mtbf = costs.mtbf_seconds(tasks)
    exponent = (interval_seconds + costs.save_seconds) / mtbf
    if exponent > 700 or costs.restart_seconds / mtbf > 700:
        return 0.0
    total = mtbf * math.exp(costs.restart_seconds / mtbf) * math.expm1(exponent)
    return interval_seconds / total
