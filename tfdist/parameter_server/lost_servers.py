"""Parameter servers that are gone: named at once, instead of waited for."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.parameter_server.serving import is_reachable

_INTERVAL_SECONDS = 1.0
_MISSES = 3  # a host under load may be late once


class Servers:
    """Looks whether the parameter servers still take connections."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """Looks at `addresses`, "host:port" of each."""
        self._addresses = list(addresses)
        self._looked_at = time.monotonic()
        self._misses = [0] * len(self._addresses)

    def look(self) -> None:
        """To be called again and again while results are waited for; looks once a second.

        Raises:
          tf.errors.UnavailableError: a server has not answered three times in a row.
        """
        if time.monotonic() < self._looked_at + _INTERVAL_SECONDS:
            return
        missing = self._missing()
        self._looked_at = time.monotonic()
        self._misses = [count + 1 if index in missing else 0 for index, count in enumerate(self._misses)]
        lost = [index for index, count in enumerate(self._misses) if count >= _MISSES]
        if lost:
            raise self._error(lost)

    def explain(self, error: tf.errors.OpError) -> None:
        """Raises an error that names the servers that are gone, if any are, in the place of `error`.

        Raises:
          tf.errors.UnavailableError: some are.
        """
        if lost := self._missing():
            raise self._error(lost) from error

    def _missing(self) -> list[int]:
        return [index for index, address in enumerate(self._addresses) if not is_reachable(address)]

    def _error(self, lost: Sequence[int]) -> tf.errors.UnavailableError:
        named = ", ".join(f"ps {index} at {self._addresses[index]}" for index in lost)
        return tf.errors.UnavailableError(
            None,
            None,
            f"A parameter server is lost, and the variables that it held. Received: no answer from {named}. Expected: "
            f"all {len(self._addresses)} up until the training ends. Start the training again: with FailureRecovery it "
            "goes on from the newest whole checkpoint; tfdist run --max-restarts R starts it again by itself.",
        )


def names_lost_servers(method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a method of an object with `servers` raise an error that names servers that are gone."""

    @functools.wraps(method)
    def explained(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except tf.errors.OpError as error:
            self.servers.explain(error)
            raise

    return explained
