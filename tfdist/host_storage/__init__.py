"""Checkpoints whose files are on the own disk, or in the memory, of each host. Does not import TensorFlow.

Every host has what all workers have in common, the parts of its workers, and copies of the parts of the workers of
the host before it, so that the others have all that a lost host had.
"""
