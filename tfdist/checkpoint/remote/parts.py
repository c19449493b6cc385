"""The files of a checkpoint on an object store, as objects of some MiB: none needs to be in memory as a whole.

Multipart uploads would leave parts behind that no list shows, and a lost reply at their end cannot be distinguished
from a failure.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tfdist.checkpoint.errors import CorruptCheckpointError
from tfdist.checkpoint.manifest import FileRecord
from tfdist.checkpoint.remote.remote_objects import Objects
from tfdist.checkpoint.shard import EncodedShard

BLOCK_BYTES = 5 << 20  # part of the format: a reader computes the number of blocks of a file from its size


def folder_of(sequence: int, attempt: str) -> str:
    """Returns the prefix of the parts of one save."""
    return f"parts/{sequence:010d}-{attempt}"


def block_sizes(folder: str, name: str, size_bytes: int) -> dict[str, int]:
    """Returns the keys of the blocks of a file, in its order, and their sizes.

    >>> block_sizes("parts/0000000007-a", "shared.safetensors", BLOCK_BYTES + 5)
    {'parts/0000000007-a/shared.safetensors.00000': 5242880, 'parts/0000000007-a/shared.safetensors.00001': 5}
    """
    begins = range(0, size_bytes, BLOCK_BYTES)
    return {f"{folder}/{name}.{index:05d}": min(BLOCK_BYTES, size_bytes - begin) for index, begin in enumerate(begins)}


def upload_part(objects: Objects, folder: str, name: str, encoded: EncodedShard) -> FileRecord:
    """Writes a file. Beside the arrays it needs the memory of two blocks, and what the library copies of them.

    Raises:
        RemoteStoreError: If a block is not known to be written.
    """
    checksum = xxhash.xxh3_128()

    def jobs() -> Iterator[Callable[[], None]]:
        keys = block_sizes(folder, name, encoded.size_bytes)
        header = np.frombuffer(encoded.header, np.uint8)
        blocks = _blocks((header, *encoded.tensors))
        for key in keys:
            block = next(blocks)
            checksum.update(block)
            yield lambda key=key, block=block: objects.put(key, block)  # type: ignore[misc]
            del block  # before the next one is made

    in_two_threads(jobs())
    return FileRecord(encoded.size_bytes, checksum.hexdigest())


def download_part(objects: Objects, folder: str, name: str, record: FileRecord, path: Path) -> None:
    """Reads a file into a new one on this host. Its checksum is not verified.

    Raises:
        CorruptCheckpointError: If a block is missing.
        RemoteStoreError: If the store does not answer.
    """
    with open(path, "xb") as file:
        guard = threading.Lock()

        def fetch(key: str, begin: int) -> None:
            block = objects.get(key)
            if block is None:
                raise CorruptCheckpointError(f"{key} is missing")
            with guard:
                file.seek(begin)
                file.write(block)

        keys = block_sizes(folder, name, record.size_bytes)
        in_two_threads(
            (lambda key=key, begin=index * BLOCK_BYTES: fetch(key, begin))  # type: ignore[misc]
            for index, key in enumerate(keys)
        )


def remove_folder(objects: Objects, folder: str, keys: Iterable[str] = ()) -> None:
    """Removes the parts of a save: these keys, and what a list shows.

    Raises:
        RemoteStoreError: If the store does not answer.
    """
    present = {*keys, *objects.sizes(folder)}
    in_two_threads((lambda key=key: objects.remove(key)) for key in sorted(present))  # type: ignore[misc]


def in_two_threads(jobs: Iterable[Callable[[], None]]) -> None:
    """Runs jobs in this thread and another one, and raises the first error. The next job is taken when one ends.

    >>> done = []
    >>> in_two_threads((lambda: done.append(1)) for _ in range(5))
    >>> done
    [1, 1, 1, 1, 1]
    """
    remaining, guard = iter(jobs), threading.Lock()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while not errors:
                with guard:
                    job = next(remaining, None)
                if job is None:
                    return
                job()
                del job  # and with it the block, before the next one is made
        except BaseException as error:
            errors.append(error)

    second = threading.Thread(target=run, name="tfdist-checkpoint-blocks")
    try:
        second.start()
    except RuntimeError:  # the interpreter exits and starts no more threads
        run()
    else:
        run()
        second.join()
    if errors:
        raise errors[0]


def _blocks(arrays: Iterable[npt.NDArray[Any]]) -> Iterator[bytes]:
    pieces: list[memoryview] = []
    filled = 0
    for array in arrays:
        source = array.reshape(-1).view(np.uint8).data
        while source:
            piece = source[: BLOCK_BYTES - filled]
            pieces.append(piece)
            source, filled = source[len(piece) :], filled + len(piece)
            if filled == BLOCK_BYTES:
                yield b"".join(pieces)
                pieces, filled = [], 0
    if pieces:
        yield b"".join(pieces)
