"""`tfdist doctor`: looks at a machine, or at all machines of a cluster, before a training does.

A check returns findings (`finding.py`) and never raises. Nothing here imports TensorFlow: a child process does, whose
crash or hang is a finding.
"""
