"""Warnings that are shown every time, not once a place in the program, as in a loop of trainings."""

import sys
import warnings


def warn(message: str) -> None:
    """Warns of `message`, as `warnings.warn` does at its first call.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as seen:
    ...     warnings.simplefilter("default")
    ...     for _ in range(2):
    ...         warn("Nothing is trained.")
    >>> len(seen)
    2
    """
    caller = sys._getframe(1)
    # Without a registry nobody remembers that it was shown.
    warnings.warn_explicit(message, UserWarning, caller.f_code.co_filename, caller.f_lineno)
