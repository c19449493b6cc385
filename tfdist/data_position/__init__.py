"""The position in the training data: how it is counted, restored and compared after a restart."""
