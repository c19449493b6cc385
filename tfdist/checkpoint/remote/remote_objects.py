"""Requests to an object store through fsspec: repeated until they succeed or the patience of an operation ends."""

import contextlib
import errno
import logging
import os
import random
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tfdist.checkpoint.errors import RemoteStoreError
from tfdist.utils.optional_modules import import_library

PATIENCE_SECONDS = 120.0
_REQUEST_SECONDS, _SHORTEST_REQUEST_SECONDS = 60.0, 2.0
_PATIENCE_AT_EXIT_SECONDS = 10.0
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
        self._connect, self._process, self._file_system = connect, 0, None
        self.creates_once, self.is_probed = is_conditional, False

    @property
    def file_system(self) -> Any:
        """The file system for this process."""
        if self._process != os.getpid():
            self._file_system, self._process = self._connect(), os.getpid()
        return self._file_system


def connect(url: str) -> tuple[Connection, str]:
    """Returns the connection of a URL, which is made when it is used, and the path within it.

    Raises:
        ImportError: If fsspec, or its library for this store, is not installed.
        ValueError: If fsspec does not know such URLs.
    """
    fsspec = import_library("fsspec", "reads and writes checkpoints on object stores", "remote")
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
            f"Invalid `directory`: an address of unknown kind. Received: directory={url!r}. Expected: a path, or an "
            "address that fsspec knows, such as s3://bucket/run, gs://bucket/run or az://container/run."
        ) from error

    def new() -> Any:
        # A listing that is cached says "not found" for what exists.
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if protocol in ("s3", "s3a"):
            configured = fsspec.config.conf.get(protocol, {}).get("config_kwargs", {})
            # `Objects` repeats requests; repeated by three layers they would take minutes to fail.
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


class Objects:
    """The objects below a path.

    Any request may fail, fail although it has succeeded, or succeed after it has failed. So a request is repeated with
    growing pauses until the failures of an operation have taken `patience_seconds` together; time in which requests
    succeed does not count.
    """

    def __init__(
        self,
        connection: Connection,
        root: str,
        *,
        patience_seconds: float | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.connection, self.root, self.sleep, self.clock = connection, root, sleep, clock
        self._patience_seconds = PATIENCE_SECONDS if patience_seconds is None else patience_seconds
        self._trouble = _Trouble()

    def for_operation(self, patience_seconds: float | None = None) -> "Objects":
        """Returns the same objects with new patience."""
        seconds = self._patience_seconds if patience_seconds is None else patience_seconds
        return Objects(self.connection, self.root, patience_seconds=seconds, sleep=self.sleep, clock=self.clock)

    def get(self, key: str, size: int | None = None) -> bytes | None:
        """Returns the content of an object, or its first `size` bytes; None if there is none.

        Raises:
            RemoteStoreError: If the store does not answer.
        """
        # `start=0` makes s3fs send one request; without, it looks up the size before, also in old lists.
        try:
            content = self._repeat("read", key, lambda path, fs, limit: fs.cat_file(path, start=0, end=size, **limit))
        except FileNotFoundError:
            return None
        return bytes(content)

    def put(self, key: str, content: bytes) -> None:
        """Writes an object.

        Raises:
            RemoteStoreError: If it is not known to be written. It may be, also later.
        """
        self._repeat("written", key, lambda path, fs, limit: _write(fs, path, content, **limit))

    def create(self, key: str, content: bytes) -> bytes | None:
        """Writes an object unless there is one.

        Returns:
            None if the object has this content: where a reply is lost, the repeated request finds what the first one
            has created. Otherwise, its content.

        Raises:
            RemoteStoreError: If it is not known whether it was created. It may be, also later.
        """
        if not self.connection.creates_once:
            there = self.get(key)
            if there is None:
                self.put(key, content)
            return None if there in (None, content) else there
        with contextlib.suppress(FileExistsError):
            self._repeat("created", key, lambda path, fs, limit: _write(fs, path, content, mode="create", **limit))
            return None
        there = self.get(key)
        if there is None:
            raise RemoteStoreError(
                f"An object is refused because it exists, and cannot be read. Received: {self._path(key)!r}. Expected: "
                "that nothing else removes objects there."
            )
        return None if there == content else there

    def remove(self, key: str) -> None:
        """Removes an object, if it is there.

        Raises:
            RemoteStoreError: If the store does not answer.
        """
        with contextlib.suppress(FileNotFoundError):
            self._repeat("removed", key, lambda path, fs, limit: fs.rm_file(path, **limit))

    def sizes(self, prefix: str) -> dict[str, int]:
        """Lists the keys below a prefix with their sizes. A list may be old: it decides nothing.

        Raises:
            RemoteStoreError: If the store does not answer.
        """
        root, folder = self.root.lstrip("/"), f"{self._path(prefix)}/".lstrip("/")

        def find(path: str, file_system: Any, limit: dict[str, float]) -> dict[str, int]:
            file_system.invalidate_cache()
            found = {name.lstrip("/"): entry for name, entry in file_system.find(path, detail=True, **limit).items()}
            # s3fs lists the prefix itself if objects below it appear meanwhile; consoles create folders as objects.
            return {
                name.removeprefix(f"{root}/"): int(entry.get("size") or 0)
                for name, entry in found.items()
                if name.startswith(folder) and not name.endswith("/")
            }

        try:
            return dict(self._repeat("listed", prefix, find))
        except FileNotFoundError:
            return {}

    def probe(self) -> None:
        """Finds out whether of two creations of an object one fails: some servers ignore the condition silently.

        Warns, once in a connection, if both succeed, or if the library does not send the condition.

        Raises:
            RemoteStoreError: If nothing can be written.
        """
        if self.connection.is_probed:
            return
        key = f"probes/{secrets.token_hex(8)}"
        first = self.create(key, b"1")
        self.connection.creates_once &= first is None and self.create(key, b"2") == b"1"
        self.connection.is_probed = True
        with contextlib.suppress(RemoteStoreError):
            self.remove(key)
        if not self.connection.creates_once:
            _log.warning(
                "This store does not create objects only if they are absent. Received: %r, of which a second creation "
                "succeeds, or whose library does not ask for it. Expected: S3, Google Cloud Storage, Azure, or a "
                "server that supports conditional writes. Checkpoints are complete, but two programs that save there "
                "at once, or one that was taken for dead and continues, may replace each other's checkpoints.",
                self.root,
            )

    def _repeat(self, action: str, key: str, request: Callable[[str, Any, dict[str, float]], Any]) -> Any:
        pause = _FIRST_PAUSE_SECONDS
        while True:
            started = self.clock()
            try:
                return request(self._path(key), self.connection.file_system, self._limit())
            except (FileNotFoundError, FileExistsError, *_MISTAKES):
                raise
            except Exception as error:
                self._trouble.seconds += self.clock() - started
                is_exiting = not threading.main_thread().is_alive()
                patience = min(self._patience_seconds, _PATIENCE_AT_EXIT_SECONDS if is_exiting else float("inf"))
                # Python's executors, which resolve names, accept nothing when the program exits.
                is_hopeless = is_exiting and isinstance(error, RuntimeError)
                if is_hopeless or self._trouble.seconds + pause > patience:
                    raise RemoteStoreError(
                        f"The object {self._path(key)!r} could not be {action}. Received: {type(error).__name__}: "
                        f"{error}, and failures for {self._trouble.seconds:.0f} s. Expected: a store that answers, and "
                        "permission to read, write, list and delete below this address. Check the address, the "
                        "credentials and the network."
                    ) from error
                _log.debug("%s could not be %s, which is tried again: %s", self._path(key), action, error)
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

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}"


def _write(file_system: Any, path: str, content: bytes, **options: Any) -> None:
    try:
        file_system.pipe_file(path, content, **options)
    except FileNotFoundError as error:  # of the bucket, not of the object
        raise OSError(str(error)) from error
    except OSError as error:
        # A refused condition without its name in the reply is an "invalid argument" for s3fs.
        if "mode" in options and error.errno == errno.EINVAL:
            raise FileExistsError(path) from error
        raise
