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


def test_the_first_that_is_left_stands_for_a_lost_worker() -> None:
    exchange, values = Exchange(1, ["localhost:1"] * 3, members=[1], token="secret"), KeyValues()
    values.use(exchange.control, [1])
    values.limit_start(5.0)
    assert values.exchange("seed", "own", 1, 3) == ["own"] * 3
    exchange.close()


def test_who_joins_knows_what_the_others_have_exchanged() -> None:
    values = KeyValues()
    values.remember({"seed": ["a", "b"]})
    assert values.exchange("seed", "c", 0, 2) == ["a", "b"]
