"""A Keras step on many replicas: sample shares, micro-batches, optimizer updates, synchronized metrics."""
