"""Sums and gathers of tensors over replicas: buckets, hierarchical and compressed reductions, byte counters, timers.

`CommunicationStats`, `LinkStats`, `ExchangeDurations` and `CompressionState` are public: strategies return them.
"""

from tfdist.collectives.byte_counters import CommunicationStats, LinkStats
from tfdist.collectives.compression_state import CompressionState
from tfdist.collectives.exchange_timer import ExchangeDurations

__all__ = ["CommunicationStats", "CompressionState", "ExchangeDurations", "LinkStats"]
