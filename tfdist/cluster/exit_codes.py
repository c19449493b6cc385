"""The exit codes to which `tfdist` gives a meaning of their own."""

PREEMPTED_EXIT_CODE = 75
"""The code of a worker, and of `tfdist run`, that was told to leave, saved and left: start it again and it goes on.

It is EX_TEMPFAIL of sysexits.h, which no shell, Python or TensorFlow uses for anything else.
"""

LOST_RUN_EXIT_CODE = 69
"""The code of `tfdist run --nodes` on a host that has lost the others: start it again and it joins them again.

It is EX_UNAVAILABLE of sysexits.h.
"""
