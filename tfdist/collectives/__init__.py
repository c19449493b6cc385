"""How tensors travel between replicas: buckets, sums, gathers, and the count of every byte."""

from tfdist.collectives.all_reduce import Exchange, ReplicaReduction
from tfdist.collectives.buckets import DEFAULT_BUCKET_BYTES, Bucket, fill_buckets
from tfdist.collectives.group import CollectiveGroup, Group
from tfdist.collectives.levels import Levels
from tfdist.collectives.state import CompressionState, ReplicaState
from tfdist.collectives.stopwatch import Durations
from tfdist.collectives.traffic import Traffic, TrafficCount
from tfdist.compression.packing import flatten, unflatten

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "Bucket",
    "CollectiveGroup",
    "CompressionState",
    "Durations",
    "Exchange",
    "Group",
    "Levels",
    "ReplicaReduction",
    "ReplicaState",
    "Traffic",
    "TrafficCount",
    "fill_buckets",
    "flatten",
    "unflatten",
]
