"""What waiting for the slowest of many workers costs.

Source: Blom 1958, "Statistical estimates and transformed beta-variables", for the expected largest of N normal values.
"""

import statistics


def expected_slowest(mean_seconds: float, deviation_seconds: float, workers: int) -> float:
    """Returns the expected time of the slowest of `workers` steps with normally distributed times.

    >>> [round(expected_slowest(1.0, 0.1, workers), 3) for workers in (1, 2, 1000)]
    [1.0, 1.059, 1.323]
    """
    if workers == 1:
        return mean_seconds
    return mean_seconds + deviation_seconds * statistics.NormalDist().inv_cdf((workers - 0.375) / (workers + 0.25))
