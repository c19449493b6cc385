"""Arrays in memory that is used again: to get fresh pages from the system costs more than to fill them."""

import collections
import ctypes
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

_ALIGNMENT_BYTES = 64  # TensorFlow takes such memory without a copy
_LEAST_BYTES = 32 * 1024  # the C library itself keeps the pages of shorter arrays
_LOOKED_AT = 8  # how many blocks of a size may be in use before a new one is made


class ReusedMemory:
    """Makes arrays, in memory of earlier ones that nothing uses any longer if there is some.

    Memory is in use as long as anything refers to an array in it, as views, buffers and TensorFlow's tensors do, so
    nothing has to be given back. All threads may share an instance.

    >>> memory = ReusedMemory(most_bytes=2**22)
    >>> first = memory.empty([1024, 256], np.float32)
    >>> address, view = first.ctypes.data, first[:1]
    >>> del first  # `view` is in use
    >>> memory.empty([1024, 256], np.float32).ctypes.data == address
    False
    >>> del view
    >>> memory.empty([512, 512], np.int32).ctypes.data == address
    True

    Args:
        most_bytes: How much memory is kept for later arrays.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._kept_bytes = most_bytes, 0
        # Memory and a reference to its present owner, by size; sizes that were needed last are at the end.
        self._blocks: collections.OrderedDict[int, collections.deque[tuple[np.ndarray, Any]]]
        self._blocks = collections.OrderedDict()
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Returns an array with any values, aligned to 64 bytes."""
        dtype = np.dtype(dtype)
        length = dtype.itemsize
        for size in shape:
            length *= int(size)
        if length < _LEAST_BYTES:
            values = _aligned(length)[:length]
        else:
            # A view refers to its array or, as here, to the object whose memory that has.
            values = np.frombuffer(self._owner(length), np.uint8, length)
        return values.view(dtype).reshape(shape)

    def _owner(self, length: int) -> Any:
        """Returns a new object with at least `length` bytes of memory."""
        granule = 1 << (length.bit_length() - 4)  # few sizes, of which 1/8 is unused at most
        size = -(-length // granule) * granule
        with self._lock:
            blocks = self._blocks.setdefault(size, collections.deque())
            self._blocks.move_to_end(size)
            memory = self._unused(blocks)
            if memory is None:
                memory = _aligned(size)
                self._make_room(size)
            owner = (ctypes.c_char * size).from_buffer(memory.data)
            if size <= self._most_bytes:
                blocks.append((memory, weakref.ref(owner)))
        return owner

    def _unused(self, blocks: collections.deque[tuple[np.ndarray, Any]]) -> np.ndarray | None:
        """Takes a block out whose owner is gone; those that were given out first are looked at first."""
        for _ in range(min(len(blocks), _LOOKED_AT)):
            memory, owner = blocks.popleft()
            if owner() is None:
                return memory
            blocks.append((memory, owner))
        return None

    def _make_room(self, size: int) -> None:
        """Counts a new block, and forgets others until not too much is kept. Those in use live as long as they are."""
        if size > self._most_bytes:
            return
        self._kept_bytes += size
        while self._kept_bytes > self._most_bytes:
            oldest, blocks = next(iter(self._blocks.items()))
            if blocks:
                blocks.popleft()
                self._kept_bytes -= oldest
            else:
                del self._blocks[oldest]


def _aligned(length: int) -> np.ndarray:
    memory = np.empty(length + _ALIGNMENT_BYTES, np.uint8)
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT_BYTES
    return memory[start : start + length]
