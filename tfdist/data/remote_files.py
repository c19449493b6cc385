"""Files on object stores and web servers, which fsspec lists, reads in ranges and removes."""

import io
import os
import urllib.parse
from typing import Any

from tfdist.data.block_source import ChangedDataError, changed
from tfdist.utils.remote_requests import START_PATIENCE_SECONDS, Connection, Requests, connect

_PART_BYTES = 8 << 20  # of a range; its parts are requested at once, where the library can
# What tells versions of an object apart, from the best to the least, as libraries of fsspec call it.
_VERSIONS = ("generation ETag etag Content-MD5 Digest Last-Modified LastModified last_modified mtime created").split()


def is_remote(path: str) -> bool:
    """Whether a path has a scheme, so that fsspec opens it."""
    return "://" in path


class RemoteFiles:
    """Files by their URLs. A process connects to a store with its first request; copies connect by themselves."""

    def __init__(self) -> None:
        self._connections: dict[str, Connection] = {}

    def __reduce__(self) -> Any:
        return RemoteFiles, ()

    def find(self, url: str) -> list[str]:
        """Returns the URL of a file, or those of the files below it.

        Raises:
            FileNotFoundError: There is nothing, or no bucket.
            RuntimeError: The store does not answer, or refuses.
        """
        requests, root = self._requests(url, START_PATIENCE_SECONDS)

        def find(path: str, file_system: Any, limit: dict[str, float]) -> list[str]:
            # First, as web servers have no lists, and their library would read a file to find links in it.
            if file_system.info(path, **limit)["type"] == "file":
                return [path]
            found = file_system.find(path, detail=True, **limit)
            return [name for name, entry in found.items() if entry["type"] == "file" and not name.endswith("/")]

        return [url.rstrip("/") + name[len(root) :] for name in requests.repeat("listed", root, find)]

    def version(self, url: str) -> tuple[int, str]:
        """Returns the size of a file in bytes, and what tells its version from others, "" if nothing does.

        Raises:
            FileNotFoundError: There is no such file.
            RuntimeError: The store does not answer.
        """
        requests, path = self._requests(url, START_PATIENCE_SECONDS)
        return _version(requests.repeat("found", path, lambda path, fs, limit: fs.info(path, **limit)))

    def open(self, url: str, version: tuple[int, str], patience_seconds: float | None = None) -> "RemoteFile":
        """Returns a version of a file. `patience_seconds` is that of the operation of which it is part."""
        requests, path = self._requests(url, patience_seconds)
        return RemoteFile(requests, path, url, version)

    def remove(self, url: str) -> None:
        """Removes a directory with what is in it; without an error if it has gone."""
        requests, path = self._requests(url, None)
        requests.permissions = "read, list and delete"
        try:
            requests.repeat("removed", path, lambda path, fs, limit: fs.rm(path, recursive=True, **limit))
        except FileNotFoundError:
            return

    def _requests(self, url: str, patience_seconds: float | None) -> tuple[Requests, str]:
        connection, path = connect(url, argument="paths", purpose="reads files of object stores")
        parts = urllib.parse.urlsplit(url)  # libraries connect to a host, a bucket or an account
        connection = self._connections.setdefault(f"{parts.scheme}://{parts.netloc}", connection)
        return Requests(connection, patience_seconds=patience_seconds), path


class RemoteFile(io.RawIOBase):
    """A version of a file, as `pyarrow` reads it: each read is a range of its bytes, which is requested until it comes.

    A range that is read may be of another version, until `check` has returned.
    """

    def __init__(self, requests: Requests, path: str, url: str, version: tuple[int, str]) -> None:
        super().__init__()
        self._requests, self._path, self._url, self._version = requests, path, url, version
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._version[0]}[whence]
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Returns the next bytes.

        Raises:
            ChangedDataError: The file was replaced or removed.
            RuntimeError: The store does not answer.
        """
        start, length = self._position, self._version[0]
        end = length if size is None or size < 0 else min(start + size, length)

        def fetch(path: str, file_system: Any, limit: dict[str, float]) -> bytes:
            starts = list(range(start, end, _PART_BYTES))
            parts = file_system.cat_ranges([path] * len(starts), starts, [*starts[1:], end], **limit)
            errors = [part for part in parts if isinstance(part, BaseException)]
            if not errors and sum(map(len, parts)) == end - start:
                return parts[0] if len(parts) == 1 else b"".join(parts)
            self._check(path, file_system, limit)  # at once where it was replaced by a smaller one
            if errors:
                raise errors[0]
            raise OSError(f"{sum(map(len, parts))} bytes for a range of {end - start}: the server must send ranges")

        if start >= end:
            return b""
        content = self._requests.repeat("read", self._path, fetch, final=(ChangedDataError,))
        self._position = end
        return bytes(content)

    def begin(self, patience_seconds: float | None = None) -> None:
        """Begins another operation, which has its own patience."""
        self._requests = Requests(self._requests.connection, patience_seconds=patience_seconds)

    def check(self) -> None:
        """Checks that what was read is of this version: it is still that of the file.

        Raises:
            ChangedDataError: The file was replaced or removed.
            RuntimeError: The store does not answer.
        """
        self._requests.repeat("found", self._path, self._check, final=(ChangedDataError,))

    def _check(self, path: str, file_system: Any, limit: dict[str, float]) -> None:
        found: Any
        try:
            found = _version(file_system.info(path, **limit))
        except FileNotFoundError as error:
            found = f"no file, {error}"
        if found != self._version:
            raise changed(self._url, str(found), f"{self._version}, its size in bytes and its version")


def _version(info: dict[str, Any]) -> tuple[int, str]:
    name = next((name for name in _VERSIONS if info.get(name)), None)
    return int(info["size"] or 0), "" if name is None else str(info[name])
