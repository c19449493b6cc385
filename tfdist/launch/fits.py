"""Programs that train more than once: steps and checkpoints are counted anew in each `fit`."""


def of_fit(number: int) -> str:
    """Returns what to add to the number of a step: nothing in the first `fit`, as most programs have no other.

    >>> f"step 41{of_fit(1)}", f"step 41{of_fit(2)}"
    ('step 41', 'step 41 of fit 2')
    """
    return "" if number == 1 else f" of fit {number}"
