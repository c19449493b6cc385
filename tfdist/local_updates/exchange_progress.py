"""Which workers have started an exchange, so that an error can name those that have not."""

from tfdist.tensorflow_internals.runtime import delete_key_value, set_key_value, wait_for_key_until

_LOOK_SECONDS = 2.0


class ExchangeProgress:
    """The exchanges that workers have started, in the key-value store of the cluster."""

    def __init__(self, name: str, rank: int, num_workers: int) -> None:
        """Prepares a worker. `name` is unique in the cluster, and the same on all workers."""
        self._name, self._rank, self._num_workers = name, rank, num_workers
        self._noted = -1

    def late_workers(self, exchange: int) -> str:
        """Notes that this worker has started an exchange; called again for it, names the workers that have not."""
        if exchange > self._noted:
            set_key_value(self._key(exchange, self._rank), "")
            if self._noted >= 1:  # all have started the exchange before the last one, which this worker has ended
                delete_key_value(self._key(self._noted - 1, self._rank))
            self._noted = exchange
            return ""
        others = [rank for rank in range(self._num_workers) if rank != self._rank]
        late = [rank for rank in others if not wait_for_key_until(self._key(exchange, rank), _LOOK_SECONDS)]
        return ", ".join(f"worker {rank}" for rank in late)

    def _key(self, exchange: int, rank: int) -> str:
        return f"{self._name}/{exchange}/{rank}"
