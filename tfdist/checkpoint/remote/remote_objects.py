"""The objects of a training on an object store: read, written, created once, removed and listed."""

import contextlib
import errno
import logging
import secrets
from collections.abc import Callable
from typing import Any

from tfdist.checkpoint.errors import RemoteStoreError
from tfdist.utils.remote_requests import Connection, Requests, connect

_log = logging.getLogger("tfdist")


def connect_store(url: str) -> tuple[Connection, str]:
    """Returns the connection and the path of the address of a training; see `connect`."""
    return connect(url, argument="directory", purpose="reads and writes checkpoints on object stores")


class Objects(Requests):
    """The objects below a path."""

    error = RemoteStoreError
    permissions = "read, write, list and delete"
    is_awaited = False

    def __init__(self, connection: Connection, root: str, **options: Any) -> None:
        """`options` are those of `Requests`."""
        super().__init__(connection, **options)
        self.root = root

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
        return self.repeat(action, self._path(key), request)

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
