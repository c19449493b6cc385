"""A strategy of tfdist whose values a test sets."""

from typing import Any

import tensorflow as tf

from tfdist.collectives import CommunicationStats
from tfdist.training.strategy_protocol import TrainingStrategy


class FakeStrategy(TrainingStrategy):
    """Has no replicas and no cluster; `values` become its attributes."""

    rank = 0
    num_workers = 1
    replicas_of_workers = (1,)
    communication = CommunicationStats()
    gradient_reduction = None
    compression_state = None
    row_shares = None
    worker_stats = ()
    num_replicas_in_sync = 1

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class FakeServers(tf.distribute.ParameterServerStrategy):
    """A strategy with parameter servers, without a cluster."""

    num_replicas_in_sync = 1

    def __init__(self):
        pass
