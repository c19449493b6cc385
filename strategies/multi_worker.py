"""MultiWorkerMirroredStrategy: the devices of many processes."""

import contextlib
import os
import secrets
import zlib
from typing import Any

import tensorflow as tf

from tfdist import cluster
from tfdist.cluster.environment import optional_integer
from tfdist.strategies.environment import resolver_of, start_timeout_seconds
from tfdist.strategies.keras_strategy import Compression, KerasStrategy
from tfdist.tensorflow_internals.extended import (
    ReplicaMultiWorkerExtended,
    equal_on_all_replicas,
    is_equal_on_all_replicas,
)
from tfdist.tensorflow_internals.server import (
    cluster_is_running,
    exit_after,
    global_seed,
    share,
    shared,
    tensorflow_has_started,
)

_UNKNOWN = -1


class MultiWorkerMirroredStrategy(KerasStrategy, tf.distribute.MultiWorkerMirroredStrategy):
    """Synchronous training on all logical devices of many workers.

    A `tf.distribute.MultiWorkerMirroredStrategy` under which Keras 3 works: `fit`, `evaluate` and `predict` compute
    what one process computes on the concatenated batch. Started by `tfdist run --workers N script.py`, or by any
    launcher that sets `TF_CONFIG`, Slurm's or Kubernetes' variables (see `tfdist.cluster`); without any of them it
    trains on the local devices alone.

    >>> from tfdist.strategies import MultiWorkerMirroredStrategy
    >>> strategy = MultiWorkerMirroredStrategy()
    >>> strategy.num_workers, strategy.rank
    (1, 0)
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        communication_options: Any = None,
        *,
        compression: Compression = None,
        bucket_bytes: int | None = None,
        start_timeout: float | None = None,
        micro_batches: int | None = None,
    ) -> None:
        """Makes the strategy; to be called before anything else makes TensorFlow's devices.

        Args:
          cluster_resolver: a `tf.distribute.cluster_resolver.ClusterResolver`; if `None`, the environment is asked.
          communication_options: a `tf.distribute.experimental.CommunicationOptions` with the implementation (ring by
            default on CPUs, NCCL where asked for) and the timeout.
          compression: how gradients are compressed before they travel between workers: a
            `tfdist.compression.Compressor`, its name ("bf16", "powersgd:4"), a mapping from regular expressions over
            variable paths to these, or a `tfdist.compression.Policy`. Not at all by default. See
            `docs/compression.md`.
          bucket_bytes: a bucket of gradients is sent when it holds that many bytes, while backpropagation goes on;
            0 sends all at the end. By default `communication_options.bytes_per_pack` if given, else 4 MiB.
          start_timeout: how many seconds the other workers may take to come up; `tfdist run --start-timeout` by
            default, else 300.
          micro_batches: how many micro-batches each replica computes of its part of a training step, one after
            another, for one update. By default 1; under `tfdist run --min-workers`, where the workers asked for are a
            multiple of those that are left, as many as make up for the missing ones.

        Raises:
          ValueError: an argument or the environment's description of the cluster is wrong.
          RuntimeError: TensorFlow had made its devices before.
          TimeoutError: a worker did not come up in time; the message names it.
          OSError: this worker's own port is taken.
        """
        reduction = self._prepare(bucket_bytes, communication_options, compression)
        options = communication_options or tf.distribute.experimental.CommunicationOptions()
        resolver = cluster_resolver or _resolver_of_environment()
        spec = resolver.cluster_spec().as_dict()
        if spec and not cluster_is_running() and tensorflow_has_started():
            raise RuntimeError(
                "MultiWorkerMirroredStrategy must be made before TensorFlow makes its devices. Received: a cluster "
                f"of {sum(map(len, spec.values()))} tasks (TF_CONFIG or its like), set or read after TensorFlow had "
                "started. Expected: the strategy to be the first thing that the program makes of TensorFlow, and "
                "TF_CONFIG to be set before it. Move it above the first tensor, variable, dataset or "
                "`tf.config.list_logical_devices()`; `tf.config.set_logical_device_configuration` may come before."
            )
        limit_seconds = start_timeout_seconds(start_timeout)
        if micro_batches is not None and (isinstance(micro_batches, bool) or micro_batches < 1):
            raise ValueError(
                f"`micro_batches` is not a number of them. Received: {micro_batches!r}. Expected: an integer of at "
                "least 1, or None."
            )
        peers = {} if cluster_is_running() else _addresses_of_others(spec, resolver)
        if peers:
            cluster.wait_for_peers(spec[resolver.task_type][resolver.task_id], peers, limit_seconds)
        with exit_after(limit_seconds) if peers else contextlib.nullcontext():
            extended = ReplicaMultiWorkerExtended(self, resolver, options, reduction)
        tf.distribute.Strategy.__init__(self, extended)
        self._micro_batches = _micro_batches(self.num_workers) if micro_batches is None else int(micro_batches)
        self._agree_on_random_seed()

    @property
    def micro_batches(self) -> int:
        """How many micro-batches each replica computes of its part of a training step, one after another."""
        return self._micro_batches

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return self.extended.num_workers

    @property
    def rank(self) -> int:
        """The number of this worker, from 0; the chief is 0."""
        return self.extended.rank

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Reduces over all replicas; see `KerasStrategy.reduce`. What is equal on all of them is not sent again."""
        if is_equal_on_all_replicas(value):
            result = self.experimental_local_results(value)[0]
            is_sum = str(getattr(reduce_op, "value", reduce_op)).upper() == "SUM"
            return result * self.num_replicas_in_sync if is_sum else result
        return super().reduce(reduce_op, value, axis)

    def _shared_results(self, results: Any) -> Any:
        # Keras reduces every log over all workers again; the wrapping tells `reduce` that this has been done.
        return tf.nest.map_structure(
            lambda value: equal_on_all_replicas(list(self.experimental_local_results(value))), results
        )

    def _agree_on_random_seed(self) -> None:
        """Gives all workers one global seed of TensorFlow unless the user has set one.

        Every worker shuffles the whole data set and takes its part: with seeds of their own some samples of an epoch
        would be seen twice and others not at all. All attempts of one `tfdist run` have the same seed, so that a
        training that goes on after a failure goes on in the same order.
        """
        if self.num_workers > 1 and global_seed() is None:
            name = f"tfdist/seed/{self._collective_key_base}"
            if self.rank == 0:
                share(name, str(_seed_of_run()))
            tf.random.set_seed(int(shared(name)))

    def _agreed_batches(self, own_batches: int | None) -> int | None:
        """The largest number of batches of all workers; unknown if one is unknown.

        A worker that runs out goes on with empty batches, which weigh nothing, until all have run out.
        """
        if self.num_workers == 1:
            return own_batches
        own = tf.constant([_UNKNOWN if own_batches is None else own_batches], tf.int64)
        batches = self.gather(own, axis=0).numpy().tolist()
        return None if _UNKNOWN in batches else max(batches)


def _micro_batches(workers: int) -> int:
    """As many as make up for the workers that are missing, where these are a multiple of those that are left."""
    remedy = "Start the workers by `tfdist run`, which sets it, or unset it."
    full = optional_integer(os.environ, "TFDIST_FULL_WORKERS", remedy=remedy) or workers
    return full // workers if full % workers == 0 else 1


def _seed_of_run() -> int:
    run = os.environ.get("TFDIST_RUN_ID")
    return secrets.randbits(31) if run is None else zlib.crc32(run.encode()) >> 1


def _resolver_of_environment() -> Any:
    config = cluster.detect()
    if config is None:
        return tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
    return resolver_of(config, num_accelerators={"GPU": _num_logical_gpus()})


def _num_logical_gpus() -> int:
    gpus = tf.config.list_physical_devices("GPU")
    return sum(len(tf.config.get_logical_device_configuration(gpu) or [None]) for gpu in gpus)


def _addresses_of_others(spec: dict[str, list[str]], resolver: Any) -> dict[str, str]:
    own = (resolver.task_type, resolver.task_id)
    return {
        f"{job} {index}": address
        for job, addresses in spec.items()
        for index, address in enumerate(addresses)
        if (job, index) != own and job in ("chief", "worker")
    }
