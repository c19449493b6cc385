"""Files of checkpoints between workers, beside the steps: sent to the disk of another one, or fetched from there."""

import contextlib
import os
import re
import secrets
import socket
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tfdist.checkpoint.checkpoint import directory_name, read_manifest, unfinished_name
from tfdist.checkpoint.direct_file import FileWriter
from tfdist.checkpoint.errors import CheckpointError, HostError
from tfdist.checkpoint.manifest import FileRecord
from tfdist.checkpoint.shard import EncodedShard
from tfdist.checkpoint.sharded_save import check_save
from tfdist.exchange.group_listener import TOKEN_VARIABLE, GroupListener, Request, ask, encryption_of
from tfdist.transport.blocking_connection import BlockingConnection
from tfdist.transport.handshake import Credentials
from tfdist.transport.transport_errors import ConnectionClosedError, TransportError
from tfdist.utils import atomic_files
from tfdist.utils.cores_and_ports import ReservedPorts, host_and_port

_GROUP, _PROTOCOL = "checkpoint files", 1
_BLOCK_BYTES = 2**20
_SILENCE_SECONDS = 60.0
_TRIES, _PAUSE_SECONDS = 3, 0.5  # of a connection: a busy host answers late
_NAME = re.compile(r"(shared|rank-\d{1,9})\.safetensors")


@dataclass(frozen=True)
class Saved:
    """Which save files belong to."""

    sequence: int
    attempt: str

    def folder(self, directory: Path) -> Path:
        """Returns where the files of this save are in the directory of a host: complete, or unfinished."""
        complete = directory / directory_name(self.sequence)
        with contextlib.suppress(CheckpointError, OSError):
            if read_manifest(complete).attempt == self.attempt:
                return complete
        return directory / unfinished_name(self.sequence, self.attempt)


class PeerFiles:
    """Answers other workers that send or want files, and asks them, until `close`.

    Args:
        directory: The directory of the checkpoints on this worker's disk.
        host: The name or address by which other workers reach this one's host.
        port: The port to listen on, unless it is 0, or in use.
        cluster: What the workers of one meeting have in common, and nobody else: files of an earlier attempt's
            workers are refused.
        write: Writes a new file and returns its checksum, as `write_direct`.
        environ: Says the token and the certificates, if there are some.

    Attributes:
        address: Where this worker answers.
        write: As given.

    Raises:
        OSError: If it cannot listen.
    """

    def __init__(
        self,
        directory: Path,
        host: str,
        port: int,
        cluster: str,
        write: FileWriter,
        environ: Mapping[str, str],
    ) -> None:
        self._directory, self.write = directory, write
        token = environ.get(TOKEN_VARIABLE, "").strip()
        self._credentials = Credentials("tfdist checkpoints", _PROTOCOL, token, cluster=cluster, same_version=True)
        self._encryption = encryption_of(environ)
        self.address = self._listen(host, port)
        _open.add(self)

    def send(
        self,
        address: str,
        saved: Saved,
        name: str,
        encoded: EncodedShard,
        record: FileRecord,
        timeout_seconds: float,
    ) -> None:
        """Writes a file to the disk of another worker, into a save in progress; flushing it takes `timeout_seconds`.

        Raises:
            HostError: If that worker does not answer, or cannot write it.
        """
        parts = (np.frombuffer(encoded.header, np.uint8), *encoded.tensors)
        with self._asked(address, "send", saved, name=name, **asdict(record)) as connection:
            for part in parts:
                content = part.reshape(-1).view(np.uint8).data
                for begin in range(0, len(content), _BLOCK_BYTES):
                    connection.send_data(content[begin : begin + _BLOCK_BYTES], _SILENCE_SECONDS)
            _raise_reported(connection.receive(timeout_seconds))

    def fetch(self, address: str, saved: Saved, name: str, record: FileRecord, path: Path) -> None:
        """Copies a file of a save from the disk of another worker to `path`.

        Raises:
            HostError: If that worker does not answer, or has another file.
            OSError: If it cannot be written here.
        """
        unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            with self._asked(address, "fetch", saved, name=name, **asdict(record)) as connection:
                checksum = self.write(unfinished, _received(connection, record.size_bytes))
            if checksum != record.xxh3_128:
                raise HostError(f"{name} came from {address} with another checksum")
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
        atomic_files.flush(path.parent)

    def damaged(
        self, address: str, saved: Saved, records: Mapping[str, FileRecord], timeout_seconds: float
    ) -> dict[str, str]:
        """Returns which files of a save are not intact on the disk of another worker, and why.

        Raises:
            HostError: If that worker does not answer.
        """
        described = {name: asdict(record) for name, record in records.items()}
        with self._asked(address, "check", saved, records=described) as connection:
            return dict(_raise_reported(connection.receive(timeout_seconds))["damaged"])

    def close(self) -> None:
        """Answers no more."""
        self._listener.close()
        _open.discard(self)

    def close_in_fork(self) -> None:
        """Closes the sockets in a forked child."""
        self._listener.close_in_fork()

    def _listen(self, host: str, wanted: int) -> str:
        for port in [wanted, *[0] * _TRIES]:
            if not port:
                with ReservedPorts(1) as reserved:
                    (port,) = reserved.ports
            try:
                return self._listen_on(host, port)
            except OSError as error:
                in_use = error  # TensorFlow's server, or another process
        raise in_use

    def _listen_on(self, host: str, port: int) -> str:
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._listener = GroupListener(address, self._credentials, encryption=self._encryption, shares_memory=False)
        self._listener.add(_GROUP, self._answer)
        self._listener.open()
        return address

    @contextlib.contextmanager
    def _asked(self, address: str, call: str, saved: Saved, **message: Any) -> Iterator[BlockingConnection]:
        message |= {"group": _GROUP, "call": call, **asdict(saved)}
        try:
            connection, answer = self._open(address, message)
            try:
                _raise_reported(answer)
                yield connection
            finally:
                connection.close()
        except TransportError as error:
            raise HostError(f"the worker at {address} did not answer: {error}") from error

    def _open(self, address: str, message: dict[str, Any]) -> tuple[BlockingConnection, dict[str, Any]]:
        for attempt in range(_TRIES):
            try:
                connection = socket.create_connection(host_and_port(address), _SILENCE_SECONDS)
                return ask(connection, self._credentials, message, encryption=self._encryption)
            except (TransportError, OSError) as error:
                if attempt == _TRIES - 1:
                    raise ConnectionClosedError(str(error)) from error
                time.sleep(_PAUSE_SECONDS)
        raise AssertionError

    def _answer(self, request: Request) -> None:
        connection, message = request.connection, request.message
        with contextlib.closing(connection):
            try:
                saved = Saved(int(message["sequence"]), str(message["attempt"]))
                check_save(saved.sequence, saved.attempt, 0, 1)
                {"send": self._take, "fetch": self._give, "check": self._check}[message["call"]](
                    connection, saved, message
                )
            except TransportError:
                raise
            except (CheckpointError, OSError, KeyError, TypeError, ValueError) as error:
                connection.send({"failed": f"{type(error).__name__}: {error}"})

    def _take(self, connection: BlockingConnection, saved: Saved, message: dict[str, Any]) -> None:
        name, record = _checked(message["name"]), _record_of(message)
        folder = self._directory / unfinished_name(saved.sequence, saved.attempt)
        atomic_files.make_directory(folder)
        connection.send({"goes": "on"})
        try:
            if self.write(folder / name, _received(connection, record.size_bytes)) != record.xxh3_128:
                raise HostError(f"{name} has arrived with another checksum")
        except BaseException:
            (folder / name).unlink(missing_ok=True)
            raise
        atomic_files.flush(folder)
        connection.send({"stored": True})

    def _give(self, connection: BlockingConnection, saved: Saved, message: dict[str, Any]) -> None:
        name, record = _checked(message["name"]), _record_of(message)
        with self._opened(saved, name) as file:
            if os.fstat(file.fileno()).st_size != record.size_bytes:
                raise HostError(f"{name} has another size")
            connection.send({"goes": "on"})
            block = memoryview(bytearray(_BLOCK_BYTES))
            while count := file.readinto(block):
                connection.send_data(block[:count], _SILENCE_SECONDS)

    def _opened(self, saved: Saved, name: str) -> FileIO:
        for _ in range(_TRIES):  # an unfinished save may become a checkpoint in between
            with contextlib.suppress(FileNotFoundError):
                return open(saved.folder(self._directory) / name, "rb", buffering=0)
        raise HostError(f"{name} is missing")

    def _check(self, connection: BlockingConnection, saved: Saved, message: dict[str, Any]) -> None:
        records = {_checked(name): _record_of(record) for name, record in message["records"].items()}
        connection.send({"goes": "on"})
        connection.send({"damaged": damaged_files(saved.folder(self._directory), records)})


def damaged_files(folder: Path, records: Mapping[str, FileRecord]) -> dict[str, str]:
    """Returns which files of a folder are not intact, and why. Reads every byte.

    Raises:
        OSError: If this user may not read a file, or the file system does not respond.
    """
    damaged = {}
    for name, record in records.items():
        try:
            record.check(folder / name, verify_checksum=True)
        except CheckpointError as error:
            damaged[name] = str(error)
    return damaged


def _checked(name: object) -> str:
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ValueError(f"no file of a checkpoint: {name!r}")
    return name


def _record_of(message: Mapping[str, Any]) -> FileRecord:
    return FileRecord(int(message["size_bytes"]), str(message["xxh3_128"]))


def _received(connection: BlockingConnection, size: int) -> Iterator[npt.NDArray[np.uint8]]:
    """Yields what arrives, in memory that is used again."""
    block = np.empty(min(size, _BLOCK_BYTES), np.uint8)
    while size:
        part = block[: min(size, _BLOCK_BYTES)]
        connection.receive_data(part.data, _SILENCE_SECONDS)
        yield part
        size -= part.size


def _raise_reported(answer: dict[str, Any]) -> dict[str, Any]:
    if "failed" in answer:
        raise HostError(str(answer["failed"]))
    return answer


def _close_all_in_fork() -> None:
    for files in list(_open):
        files.close_in_fork()
    _open.clear()


_open: "weakref.WeakSet[PeerFiles]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_all_in_fork)
