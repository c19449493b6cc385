"""Memory for the results of exchanges, which is used again: the kernel clears new memory, which costs much.

An array, its views and the tensors that share its memory hold a lease; the memory returns when the last one is freed.
"""

import collections
import math
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT_BYTES = 64
# The allocator of C uses shorter memory again by itself.
_SHORTEST_BYTES = 2**18
# The memory that was in use at once during so many leases, and as many before them, is kept.
_WINDOW = 256


class ResultMemory:
    """Aligned memory: as much as was in use at once a short time ago, at most.

    >>> memory = ResultMemory()
    >>> array = memory.empty((1_000_000,), np.float32)
    >>> address, view = array.ctypes.data, array[5:]
    >>> del array
    >>> memory.empty((1_000_000,), np.float32).ctypes.data == address
    False
    >>> del view
    >>> memory.empty((1_000_000,), np.float32).ctypes.data == address
    True
    """

    def __init__(self) -> None:
        # A lease ends in any thread, also while this one holds the lock: so it only appends to this.
        self._returned: collections.deque[NDArray[np.uint8]] = collections.deque()
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self._lock = threading.Lock()
        self._used_bytes = self._free_bytes = 0
        self._leases = self._peak_bytes = self._last_peak_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Returns an array without values, whose memory TensorFlow can use without a copy."""
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _SHORTEST_BYTES:
            return _aligned(nbytes).view(dtype).reshape(shape)
        leased = np.asarray(_Lease(self._take(nbytes), self._returned))
        return leased.view(dtype).reshape(shape)

    def _take(self, nbytes: int) -> NDArray[np.uint8]:
        with self._lock:
            while self._returned:
                block = self._returned.popleft()
                self._used_bytes -= block.nbytes
                self._free_bytes += block.nbytes
                self._free.setdefault(block.nbytes, []).append(block)
            self._leases += 1
            if self._leases % _WINDOW == 0:
                self._last_peak_bytes, self._peak_bytes = self._peak_bytes, 0
            self._used_bytes += nbytes
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
            blocks = self._free.pop(nbytes, [])
            found = blocks.pop() if blocks else None
            if found is not None:
                self._free_bytes -= nbytes
            if blocks:
                self._free[nbytes] = blocks  # the size that was used last is dropped last
            while self._free_bytes + self._used_bytes > max(self._peak_bytes, self._last_peak_bytes):
                size = next(iter(self._free))
                self._free[size].pop()
                self._free_bytes -= size
                if not self._free[size]:
                    del self._free[size]
        return _aligned(nbytes) if found is None else found


class _Lease:
    """Memory that is in use as long as this object, which is the base of an array."""

    def __init__(self, block: NDArray[np.uint8], returned: "collections.deque[NDArray[np.uint8]]") -> None:
        self._block, self._returned = block, returned
        self.__array_interface__ = block.__array_interface__

    def __del__(self) -> None:
        self._returned.append(self._block)


def _aligned(nbytes: int) -> NDArray[np.uint8]:
    memory = np.empty(nbytes + _ALIGNMENT_BYTES, np.uint8)
    offset = -memory.__array_interface__["data"][0] % _ALIGNMENT_BYTES
    return memory[offset : offset + nbytes]


_memory = ResultMemory()


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Returns an array without values from the memory of this process' results."""
    return _memory.empty(shape, dtype)
