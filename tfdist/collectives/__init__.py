"""How tensors travel between replicas: buckets, sums, gathers, and the count of every byte."""

from tfdist.collectives.all_reduce import Exchange, ReplicaReduction
from tfdist.collectives.buckets import DEFAULT_BUCKET_BYTES, Bucket, fill_buckets
from tfdist.collectives.group import CollectiveGroup, Group
from tfdist.collectives.traffic import Traffic, TrafficCount

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "Bucket",
    "CollectiveGroup",
    "Exchange",
    "Group",
    "ReplicaReduction",
    "Traffic",
    "TrafficCount",
    "fill_buckets",
]
