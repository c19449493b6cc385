"""Disables autotuning of datasets in tests: TensorFlow's tuning thread may miss that its iterator is being deleted.

`CancellationManager` runs its callbacks before it marks itself as cancelled. The tuning thread, woken by such a
callback, may check too early and sleep again for as long as the iterator has lived, up to 60 s, and the deletion of the
iterator waits for it. This is frequent on two busy cores (TensorFlow 2.21). The data is the same without tuning.
"""

from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops


def _apply(self: Any) -> Any:
    options = tf.data.Options()
    options.autotune.enabled = False
    return self.with_options(options)


def install() -> None:
    """Creates all later iterators of this process without a tuning thread."""
    dataset_ops.DatasetV2._apply_debug_options = _apply
