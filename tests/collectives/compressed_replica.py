"""A replica that reduces compressed gradients over any group, and what it keeps between its steps."""

import tensorflow as tf

from tfdist.collectives.byte_counters import ByteCounters
from tfdist.collectives.compressed_all_reduce import CompressedReduction
from tfdist.collectives.compression_state import ReplicaState


class Replica:
    """Reduces by a policy; `labels` has those of its collectives, one a bucket."""

    def __init__(self, group, policy, bucket_bytes=0):
        self.group, self.labels, self.counters = group, [], ByteCounters("CPU:0")
        self.state = ReplicaState("CPU:0")
        self._reduction = CompressedReduction(policy, self.state, self.counters, bucket_bytes, self._labelled)

    def _labelled(self, label):
        self.labels.append(label)
        return self.group

    def sums(self, gradients, paths):
        return self._reduction([_tensor(gradient) for gradient in gradients], list(paths))

    def entries(self):
        return {
            f"{path}:{name}": variable.numpy().copy()
            for path, entries in self.state.entries.items()
            for name, variable in entries.items()
        }


def _tensor(gradient):
    return gradient if isinstance(gradient, tf.IndexedSlices) else tf.convert_to_tensor(gradient)
