"""Elastic training: a step counts on all workers or on none, and a worker that joins repeats the others' steps."""
