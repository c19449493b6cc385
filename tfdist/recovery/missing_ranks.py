"""What a worker restores of which nothing was saved: it had been lost in an elastic training."""

from collections.abc import Collection

import numpy as np

from tfdist.checkpoint import Shard
from tfdist.collectives.compression_state import SUMMED_ENTRIES
from tfdist.recovery.callback_state import PYTHON_TENSORS
from tfdist.recovery.compression_arrays import COMPRESSION
from tfdist.recovery.resharding import group_by_variable, replica_name
from tfdist.recovery.variable_names import ACCUMULATORS, LOCAL_UPDATES

_COUNTS = ("fresh", "samples")  # of `SyncedOptimizer.own_variables`


def shard_of_missing_rank(shard: Shard, rank: int, summed: Collection[str] = ()) -> Shard:
    """Returns the shard of `rank`, made of that of another rank with as many replicas.

    Residuals are zero: what the worker had not sent is lost, and those of the other one stay where they are. So are
    accumulated gradients, since all workers that have added up some have saved them (see `ElasticCoordination`), the
    samples by which its weights count in the next exchange of local updates, and the variables with the names `summed`,
    whose values are added up over the replicas.

    >>> names = ["state/1.Dense/0@0", "local_updates/0/updates@0", "metrics/0.Mean/0@0", "local_updates/0/samples@0"]
    >>> made = shard_of_missing_rank(Shard(dict.fromkeys(names, np.ones(1))), 2, summed=["metrics/0.Mean/0"])
    >>> {name: value.tolist() for name, value in made.tensors.items() if value}
    {'state/1.Dense/0@2': [1.0], 'local_updates/0/updates@2': [1.0]}
    """
    tensors = {name: value for name, value in shard.tensors.items() if name.startswith(PYTHON_TENSORS)}
    variables = {name: value for name, value in shard.tensors.items() if name not in tensors}
    for name, values in group_by_variable(variables).items():
        is_residual = name.startswith(COMPRESSION) and name.rpartition("/")[2] in SUMMED_ENTRIES
        is_count = name.startswith(LOCAL_UPDATES) and name.rpartition("/")[2] in _COUNTS
        is_zero = is_residual or is_count or name.startswith(ACCUMULATORS) or name in summed
        for index, (_, value) in enumerate(sorted(values.items())):
            number = rank * len(values) + index
            tensors[replica_name(name, number)] = np.zeros_like(value) if is_zero else value
    return Shard(tensors, shard.metadata)
