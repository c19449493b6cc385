"""Values under keys: limits of waits."""

import threading

from tfdist.collectives.key_values import KeyValues
from tfdist.exchange.worker_exchange import Exchange


def test_a_limit_may_be_longer_than_a_thread_can_wait() -> None:
    exchange, values = Exchange(0, ["localhost:1"], token="secret"), KeyValues()
    values.use(exchange.control)
    threading.Timer(0.1, exchange.control.publish, ("key", "value")).start()
    assert values.is_published("key", 1e10)
    exchange.close()
