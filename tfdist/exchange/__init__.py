"""Exchanges of arrays between the workers of a training: authenticated connections, shared memory, and NumPy.

No TensorFlow: `tfdist.collectives` hands the tensors of a graph to an `Exchange` and takes the results back.
"""
