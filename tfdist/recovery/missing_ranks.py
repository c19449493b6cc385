"""What a worker restores of which nothing was saved: it had been lost in an elastic training."""

from collections.abc import Collection

import numpy as np

from tfdist.checkpoint import Shard
from tfdist.collectives.compression_state import SUMMED_ENTRIES
from tfdist.recovery.compression_arrays import COMPRESSION
from tfdist.recovery.resharding import group_by_variable, replica_name
from tfdist.recovery.variable_names import ACCUMULATORS


def shard_of_missing_rank(shard: Shard, rank: int, summed: Collection[str] = ()) -> Shard:
    """Returns the shard of `rank`, made of that of another rank with as many replicas.

    Residuals are zero: what the worker had not sent is lost, and those of the other one stay where they are. So are
    accumulated gradients, since all workers that have added up some have saved them (see `ElasticCoordination`), and
    the variables with the names `summed`, whose values are added up over the replicas.

    >>> shard = Shard({"state/1.Dense/0@0": np.ones(2), "metrics/0.Mean/0@0": np.ones(2)})
    >>> made = shard_of_missing_rank(shard, 2, summed=["metrics/0.Mean/0"])
    >>> {name: value.tolist() for name, value in made.tensors.items()}
    {'state/1.Dense/0@2': [1.0, 1.0], 'metrics/0.Mean/0@2': [0.0, 0.0]}
    """
    tensors = {}
    for name, values in group_by_variable(shard.tensors).items():
        is_residual = name.startswith(COMPRESSION) and name.rpartition("/")[2] in SUMMED_ENTRIES
        is_zero = is_residual or name.startswith(ACCUMULATORS) or name in summed
        for index, (_, value) in enumerate(sorted(values.items())):
            number = rank * len(values) + index
            tensors[replica_name(name, number)] = np.zeros_like(value) if is_zero else value
    return Shard(tensors, shard.metadata)
