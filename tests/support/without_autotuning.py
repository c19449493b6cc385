"""Data sets of tests are not autotuned: TensorFlow's tuning thread misses that its iterator is being freed.

`CancellationManager` runs its callbacks before it says that it is cancelled, so that the thread which such a callback
wakes may look too early and sleep on, for as long as the iterator has lived, up to 60 s; who frees the iterator waits
for it. Not rare on two busy cores (TensorFlow 2.21). What is drawn is the same.
"""

from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops


def _apply(self: Any) -> Any:
    options = tf.data.Options()
    options.autotune.enabled = False
    return self.with_options(options)


def install() -> None:
    """Makes all iterators of this process without a tuning thread."""
    dataset_ops.DatasetV2._apply_debug_options = _apply
