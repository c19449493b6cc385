"""Exit codes with a meaning for schedulers."""

PREEMPTED_EXIT_CODE = 75
"""A worker, or `tfdist run`, was preempted and has saved: start it again to resume.

EX_TEMPFAIL of sysexits.h. Shells, Python and TensorFlow do not use it.
"""

LOST_RUN_EXIT_CODE = 69
"""`tfdist run --nodes` has lost the connection to the other nodes: start it again to rejoin them.

EX_UNAVAILABLE of sysexits.h.
"""
