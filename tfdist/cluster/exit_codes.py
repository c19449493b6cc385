"""The exit code to which `tfdist` gives a meaning of its own."""

PREEMPTED_EXIT_CODE = 75
"""The code of a worker, and of `tfdist run`, that was told to leave, saved and left: start it again and it goes on.

It is EX_TEMPFAIL of sysexits.h, which no shell, Python or TensorFlow uses for anything else.
"""
