"""Arrays in memory that is used again: to get fresh pages from the system costs more than to fill them."""

import collections
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

_ALIGNMENT_BYTES = 64  # TensorFlow takes such memory without a copy
_LEAST_BYTES = 32 * 1024  # the C library itself keeps the pages of shorter arrays
# Memory is kept up to the most that was in use at once while so many arrays were made, or the same number before them.
_WINDOW = 256


class ReusedMemory:
    """Makes arrays, in memory of earlier ones that nothing uses any longer if there is some.

    Memory is in use as long as anything refers to an array in it, as views, buffers and TensorFlow's tensors do, so
    nothing has to be given back. No more is kept than was in use at once a short time ago. All threads may share an
    instance.

    >>> memory = ReusedMemory()
    >>> first = memory.empty([1024, 256], np.float32)
    >>> address, view = first.ctypes.data, first[:1]
    >>> del first  # `view` is in use
    >>> memory.empty([1024, 256], np.float32).ctypes.data == address
    False
    >>> del view
    >>> memory.empty([512, 512], np.int32).ctypes.data == address
    True
    """

    def __init__(self) -> None:
        # Owners end in any thread, also in one that holds the lock: so they only append to this.
        self._returned: collections.deque[np.ndarray] = collections.deque()
        self._free: dict[int, list[np.ndarray]] = {}  # by size; the size that was needed last is at the end
        self._lock = threading.Lock()
        self._used_bytes = self._free_bytes = 0
        self._made = self._peak_bytes = self._last_peak_bytes = 0

    def empty(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Returns an array with any values, aligned to 64 bytes."""
        dtype = np.dtype(dtype)
        length = math.prod(shape) * dtype.itemsize
        if length < _LEAST_BYTES:
            values = _aligned(length)
        else:
            # A view refers to its array or, as here, to the object whose memory that has.
            values = np.asarray(_Owner(self._block(length), self._returned))[:length]
        return values.view(dtype).reshape(shape)

    def _block(self, length: int) -> np.ndarray:
        granule = 1 << (length.bit_length() - 4)  # few sizes, of which 1/8 is unused at most
        size = -(-length // granule) * granule
        with self._lock:
            while self._returned:
                block = self._returned.popleft()
                self._used_bytes -= block.nbytes
                self._free_bytes += block.nbytes
                self._free.setdefault(block.nbytes, []).append(block)
            self._made += 1
            if self._made % _WINDOW == 0:
                self._last_peak_bytes, self._peak_bytes = self._peak_bytes, 0
            self._used_bytes += size
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
            blocks = self._free.pop(size, [])
            free_block = blocks.pop() if blocks else None
            if free_block is not None:
                self._free_bytes -= size
            if blocks:
                self._free[size] = blocks
            while self._free_bytes + self._used_bytes > max(self._peak_bytes, self._last_peak_bytes):
                self._forget_oldest()
        return _aligned(size) if free_block is None else free_block

    def _forget_oldest(self) -> None:
        size, blocks = next(iter(self._free.items()))
        blocks.pop()
        self._free_bytes -= size
        if not blocks:
            del self._free[size]


class _Owner:
    """The base of an array: memory that is in use as long as this object."""

    def __init__(self, block: np.ndarray, returned: collections.deque[np.ndarray]) -> None:
        self._block, self._returned = block, returned
        self.__array_interface__ = block.__array_interface__

    def __del__(self) -> None:
        self._returned.append(self._block)


def _aligned(length: int) -> np.ndarray:
    memory = np.empty(length + _ALIGNMENT_BYTES, np.uint8)
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT_BYTES
    return memory[start : start + length]
