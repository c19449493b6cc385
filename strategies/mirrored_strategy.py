"""MirroredStrategy: trains on the devices of one process."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.sharded_state.state_sharding import ShardedState
from tfdist.strategies.replicated_strategy import Compression, ReplicatedStrategy
from tfdist.strategies.version_canaries import check_installed_versions
from tfdist.tensorflow_internals.strategy_extended import ReplicaMirroredExtended


class MirroredStrategy(ReplicatedStrategy, tf.distribute.MirroredStrategy):
    """Synchronous training on the devices of one machine, in one process.

    A `tf.distribute.MirroredStrategy` under which Keras 3 computes what one process computes on the concatenated
    batch, gradient accumulation included. `docs/guarantees.md` lists what that covers.

    >>> import keras, numpy as np
    >>> from tfdist.strategies import MirroredStrategy
    >>> strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    ...     model.compile(keras.optimizers.Adam(gradient_accumulation_steps=2, global_clipnorm=1.0), loss="mse")
    >>> history = model.fit(np.ones([8, 3], "float32"), np.ones([8, 1], "float32"), batch_size=4, verbose=0)
    >>> int(model.optimizer.iterations)
    1
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: Any = None,
        *,
        compression: Compression = None,
        bucket_bytes: int | None = None,
        shard_optimizer_state: bool | ShardedState = False,
        shard_weights: bool = False,
        communication_options: Any = None,
    ) -> None:
        """Creates the strategy.

        Args:
            devices: Device names such as `["GPU:0", "GPU:1"]`. If `None`, all GPUs, or the CPU if there is no GPU.
            cross_device_ops: A `tf.distribute.CrossDeviceOps` for reductions outside of a replica
                (`strategy.reduce`). Gradients and metrics always use collectives.
            compression: The compression of gradients: a `tfdist.compression.Compressor`, its name ("bf16",
                "powersgd:4"), a mapping from regular expressions over variable paths to these, or a
                `tfdist.compression.Policy`. No compression by default. See `docs/compression.md`.
            bucket_bytes: The size from which a bucket of gradients is sent, during backpropagation, in bytes. 0 sends
                all gradients at the end. By default `communication_options.bytes_per_pack` if given, else 4 MiB.
            shard_optimizer_state: Whether each replica holds the slots (moments, averages of weights) of its part of
                the variables only, updates that part, and receives the others. A `ShardedState` has options. See
                `docs/sharded_state.md`.
            shard_weights: Whether each replica holds its part of the weights only, and of all slots: those of a layer
                are gathered when it computes. As `shard_optimizer_state=ShardedState(weights=True)`.
            communication_options: A `tf.distribute.experimental.CommunicationOptions` with the implementation (ring,
                NCCL) and the timeout. By default NCCL between GPUs, a ring between CPUs and virtual GPUs.

        Raises:
            ValueError: An argument is invalid, or the devices cannot reduce with each other.
        """
        reduction = self._configure(
            bucket_bytes, communication_options, compression, shard_optimizer_state, shard_weights
        )
        extended = ReplicaMirroredExtended(self, devices, cross_device_ops, communication_options, reduction)
        tf.distribute.Strategy.__init__(self, extended)
        self._split_state()
        check_installed_versions(is_chief=True)

    @property
    def replicas_of_workers(self) -> tuple[int]:
        """The number of devices: there is one process."""
        return (self.num_replicas_in_sync,)
