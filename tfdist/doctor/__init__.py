"""`tfdist doctor`: checks a machine, or all machines of a cluster, before a training.

A check returns findings (`report.py`) and never raises. Nothing here imports TensorFlow: a child process does, whose
crash or hang is a finding.
"""
