"""The state of a training in memory: encoded by the worker that sends it, and read like a checkpoint by another one."""

import json
from collections.abc import Sequence
from typing import Any

from tfdist.checkpoint.shard import Shard, decode_shard, encode_shard
from tfdist.recovery.missing_ranks import shard_of_missing_rank
from tfdist.recovery.training_state import Snapshot


def encode_state(snapshot: Snapshot, metadata: dict[str, Any]) -> list[Any]:
    """Encodes a snapshot of the chief's, and what belongs to it, as JSON.

    Returns:
        The buffers, which share the memory of the snapshot.

    Raises:
        ValueError: See `encode_shard`.
    """
    assert snapshot.shared is not None
    parts: list[Any] = [json.dumps(metadata).encode()]
    for shard in (snapshot.shared, snapshot.rank):
        encoded = encode_shard(shard)
        parts += [len(encoded.tensors).to_bytes(8, "little"), encoded.header, *encoded.tensors]
    return parts


class ReceivedState:
    """What `TrainingState.restore` needs of a checkpoint. It is that of any rank.

    Args:
        parts: What has arrived of the buffers of `encode_state`, as bytes. The arrays share its memory.
        num_ranks: The number of ranks.
    """

    def __init__(self, parts: Sequence[Any], num_ranks: int) -> None:
        self.metadata: dict[str, Any] = json.loads(bytes(parts[0]))
        self.num_ranks, self.saved_ranks = num_ranks, range(num_ranks)
        self._shards: list[Shard] = []
        rest = list(parts[1:])
        while rest:
            count = int.from_bytes(bytes(rest[0]), "little")
            self._shards.append(decode_shard(bytes(rest[1]), rest[2 : count + 2]))
            rest = rest[count + 2 :]

    def read_shared(self) -> Shard:
        """Returns what is equal on all ranks."""
        return self._shards[0]

    def read_rank(self, rank: int) -> Shard:
        """Returns what the donor's replicas have, as that of the replicas of a rank with as many devices."""
        return shard_of_missing_rank(self._shards[1], rank)
