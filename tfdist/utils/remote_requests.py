"""Requests to object stores through fsspec: repeated until they succeed or the patience of an operation ends."""

import logging
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tfdist.utils.optional_modules import import_library

PATIENCE_SECONDS = 120.0
START_PATIENCE_SECONDS = 30.0  # a wrong address should not take long to be reported
_REQUEST_SECONDS, _SHORTEST_REQUEST_SECONDS = 60.0, 2.0
_PATIENCE_AT_EXIT_SECONDS, _REPORTED_AFTER_SECONDS = 10.0, 5.0
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.1, 8.0
# Their libraries send the condition of a creation to the server. Others look first and write then, or refuse.
_CONDITIONAL_PROTOCOLS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory")
_MISTAKES = (TypeError, AttributeError, NotImplementedError, ImportError)  # not the store's
_log = logging.getLogger("tfdist")
# Its own, so that a background thread does not draw from the generator whose state a training restores.
_jitter = random.Random()


class Connection:
    """The file system of a URL, a new one in each process: its threads do not survive a fork.

    Attributes:
        creates_once: Whether of two creations of an object one fails. Assumed until `is_probed`.
        is_probed: Whether that was found out.
    """

    def __init__(self, connect: Callable[[], Any], *, is_conditional: bool = True) -> None:
        """`is_conditional`: whether the library sends the condition of a creation to the server."""
        self._connect, self._process = connect, 0
        self._file_system = self._inherited = None
        self.creates_once, self.is_probed = is_conditional, False

    @property
    def file_system(self) -> Any:
        """The file system for this process."""
        if self._process != os.getpid():
            # Not released: that would close connections which the other process uses, in a loop that runs there only.
            self._inherited = self._file_system
            self._file_system, self._process = self._connect(), os.getpid()
        return self._file_system


def connect(url: str, *, argument: str, purpose: str) -> tuple[Connection, str]:
    """Returns the connection of a URL, which is made when it is used, and the path within it.

    Args:
        url: An address of a user.
        argument: The argument that it was given as.
        purpose: What fsspec is for, as in "fsspec, which reads data".

    Raises:
        ImportError: If fsspec, or its library for this store, is not installed.
        ValueError: If fsspec does not know such URLs.
    """
    fsspec = import_library("fsspec", purpose, "remote")
    protocol = url.partition("://")[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise ImportError(
            f"The library for {protocol}:// is not installed. Received: {url!r}; {error}. Expected: the extra "
            "`remote`. Run: pip install 'tfdist[remote]'"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"Invalid `{argument}`: an address of unknown kind. Received: {argument}={url!r}. Expected: a path, or an "
            "address that fsspec knows, such as s3://bucket/run, gs://bucket/run or az://container/run."
        ) from error

    def new() -> Any:
        # A listing that is cached says "not found" for what exists.
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if protocol in ("s3", "s3a"):
            configured = fsspec.config.conf.get(protocol, {}).get("config_kwargs", {})
            # `Requests` repeats them; repeated by three layers they would take minutes to fail.
            only_once = {"retries": {"total_max_attempts": 1}}
            options["config_kwargs"] = {"connect_timeout": 10, "read_timeout": 60, **configured, **only_once}
        file_system, _ = fsspec.core.url_to_fs(url, **options)
        if hasattr(file_system, "retries"):
            file_system.retries = 1
        return file_system

    path = fsspec.core.strip_protocol(url).rstrip("/")
    return Connection(new, is_conditional=protocol in _CONDITIONAL_PROTOCOLS), path


@dataclass
class _Trouble:
    seconds: float = 0.0  # that failed requests and pauses took


class RequestError(RuntimeError):
    """A store did not answer, or refused, for as long as an operation waits."""


class Requests:
    """Requests of one operation, such as a save, or the reading of a block.

    Any request may fail, fail although it has succeeded, or succeed after it has failed. So a request is repeated with
    growing pauses until the failures of an operation have taken `patience_seconds` together; time in which requests
    succeed does not count.
    """

    error: type[RuntimeError] = RequestError
    permissions = "read and list"  # what must be allowed
    is_awaited = True  # whether the program waits for it, so that it is warned of long failures

    def __init__(
        self,
        connection: Connection,
        *,
        patience_seconds: float | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.connection, self.sleep, self.clock = connection, sleep, clock
        self._patience_seconds = PATIENCE_SECONDS if patience_seconds is None else patience_seconds
        self._trouble = _Trouble()

    def repeat(
        self,
        action: str,
        path: str,
        request: Callable[[str, Any, dict[str, float]], Any],
        *,
        final: tuple[type[Exception], ...] = (),
    ) -> Any:
        """Returns the result of `request(path, file_system, limit)`, whose requests get the arguments `limit`.

        Args:
            action: What it does to the object, as in "could not be read".
            path: The path of the object.
            request: Sends a request. Errors that are not repeated: that something exists or is missing, and mistakes.
            final: Further errors that are not repeated.

        Raises:
            RuntimeError: `error`, if the patience of the operation has ended.
        """
        raised: tuple[type[Exception], ...] = (FileNotFoundError, FileExistsError, *_MISTAKES, *final)
        pause, is_reported = _FIRST_PAUSE_SECONDS, not self.is_awaited
        while True:
            started = self.clock()
            try:
                return request(path, self.connection.file_system, self._limit())
            except raised:
                raise
            except Exception as error:
                self._trouble.seconds += self.clock() - started
                is_exiting = not threading.main_thread().is_alive()
                patience = min(self._patience_seconds, _PATIENCE_AT_EXIT_SECONDS if is_exiting else float("inf"))
                # Python's executors, which resolve names, accept nothing when the program exits.
                is_hopeless = is_exiting and (isinstance(error, RuntimeError) or "cannot schedule new" in str(error))
                if is_hopeless or self._trouble.seconds + pause > patience:
                    raise self.error(
                        f"The object {path!r} could not be {action}. Received: {type(error).__name__}: "
                        f"{error}, and failures for {self._trouble.seconds:.0f} s. Expected: a store that answers, and "
                        f"permission to {self.permissions} below this address. Check the address, the credentials and "
                        "the network."
                    ) from error
                level = logging.DEBUG
                if not is_reported and self._trouble.seconds > _REPORTED_AFTER_SECONDS:
                    is_reported, level = True, logging.WARNING
                message = "The object %r could not be %s, which is tried again for %.0f s: %s: %s"
                _log.log(level, message, path, action, patience - self._trouble.seconds, type(error).__name__, error)
            self.sleep(pause * _jitter.uniform(0.5, 1.0))
            self._trouble.seconds += pause
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)

    def _limit(self) -> dict[str, float]:
        """Returns the argument of fsspec that ends a request without a reply, if the library has it.

        Those of the library do not suffice: that of S3 waits without end for the permission to send what it writes.
        """
        left = max(self._patience_seconds - self._trouble.seconds, _SHORTEST_REQUEST_SECONDS)
        has_limit = getattr(self.connection.file_system, "async_impl", False)
        return {"timeout": min(_REQUEST_SECONDS, left)} if has_limit else {}
