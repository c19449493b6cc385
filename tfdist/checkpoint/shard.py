"""A shard of a checkpoint: what one rank saves, stored as one safetensors file."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from tfdist.checkpoint.direct_file import FileWriter, write_direct
from tfdist.checkpoint.errors import CorruptCheckpointError
from tfdist.utils.dtypes import dtype_named

Json = dict[str, Any]
_Array = npt.NDArray[Any]
ShardReader = Callable[[Path], "Shard"]  # as `read_shard`
# The names in the format of the dtypes that it has.
_CODES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
_ESCAPE_PREFIX = "json:"
_METADATA = "__metadata__"
_MAX_HEADER_BYTES = 100_000_000  # what readers accept
_ALIGNMENT_BYTES = 8
_SIZE_BYTES = 8  # of the header, before it


@dataclass(frozen=True)
class Shard:
    """Named tensors with JSON metadata.

    Attributes:
        tensors: Arrays of any name and shape, including `()` and `(0, 3)`, of NumPy's numeric dtypes, bool, or a dtype
            of `ml_dtypes` (bfloat16, float8).
        metadata: A dictionary that JSON can represent. It is read as JSON has it: a tuple as a list, keys as strings.
    """

    tensors: Mapping[str, _Array]
    metadata: Json = field(default_factory=dict)


@dataclass(frozen=True)
class EncodedShard:
    """The content of a safetensors file."""

    header: bytes  # its own size, then names, dtypes, shapes and positions of the tensors, and the metadata, as JSON
    tensors: tuple[_Array, ...]  # C-contiguous, in the order of the file, without gaps; they share the shard's memory

    @property
    def size_bytes(self) -> int:
        """The size of the file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


def encode_shard(shard: Shard) -> EncodedShard:
    """Checks that a shard can be written and prepares it for `write_shard`.

    Raises:
        ValueError: If the dtype of a tensor is not numeric, the metadata is not JSON, or names and metadata are too
            large.
    """
    metadata = dump_metadata(shard.metadata)
    tensors: dict[str, tuple[str, _Array]] = {}
    dtypes: dict[str, str] = {}
    for name, tensor in shard.tensors.items():
        array = np.asarray(tensor, order="C")
        stored = _stored_dtype(array.dtype)
        if stored is None or not isinstance(name, str):
            raise ValueError(
                f"A tensor of a checkpoint cannot be written. Received: {name!r} of dtype {array.dtype}. Expected: a "
                "string as name, and a numeric dtype of NumPy, bool, or a dtype of ml_dtypes. Store strings and "
                "objects in the metadata, as JSON."
            )
        array = array.astype(stored.dtype, copy=False)
        if stored.is_bytes:
            dtypes[name] = array.dtype.name
            array = array.reshape(-1).view(np.uint8).reshape(*array.shape, array.dtype.itemsize)
        tensors[_to_stored_name(name)] = (stored.code, array)
    # Large items first, as safetensors has them, so that all are aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1][1].itemsize, item[0]))
    content: Json = {_METADATA: {"metadata": metadata, "dtypes": json.dumps(dtypes)}}
    end = 0
    for name, (code, array) in ordered:
        begin, end = end, end + array.nbytes
        content[name] = {"dtype": code, "shape": array.shape, "data_offsets": (begin, end)}
    return EncodedShard(_encode_header(content), tuple(array for _, (_, array) in ordered))


def write_shard(path: Path, encoded: EncodedShard, write: FileWriter = write_direct) -> str:
    """Writes a shard to a new file by `write`, and flushes it to the disk. Other threads run while it is written.

    Returns:
        The XXH3 checksum of the content, see `write_direct`.

    Raises:
        OSError: If the file cannot be written, with the error number of the system.
        FileExistsError: If the file exists.
    """
    header = np.frombuffer(encoded.header, np.uint8)
    return write(path, (header, *encoded.tensors))


def read_shard(path: Path) -> Shard:
    """Reads a shard into memory. The arrays are writable.

    Raises:
        CorruptCheckpointError: If `write_shard` did not write this file.
    """
    try:
        with safe_open(path, framework="np") as file:
            header = file.metadata()
            stored = {_from_stored_name(name): file.get_tensor(name) for name in file.keys()}
        dtypes = json.loads(header["dtypes"])
        tensors = {name: _with_dtype(array, dtypes.get(name)) for name, array in stored.items()}
        return Shard(tensors, json.loads(header["metadata"]))
    except PermissionError:
        raise
    except (SafetensorError, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise CorruptCheckpointError(f"{path.name} cannot be read: {error}") from error


def map_shard(path: Path) -> Shard:
    """Returns a shard whose arrays are the file itself: of what is not read, nothing is copied.

    What is written to an array stays in this process. The arrays change with the file, so nothing may write to it while
    they are used; it may be removed, and its memory is free when they are.

    Raises:
        CorruptCheckpointError: If `write_shard` did not write this file.
    """
    try:
        content = np.memmap(path, np.uint8, mode="c")
        end = _SIZE_BYTES + int.from_bytes(content[:_SIZE_BYTES], "little")
        header = content[:end].tobytes()
        offsets = [
            entry["data_offsets"] for name, entry in json.loads(header[_SIZE_BYTES:]).items() if name != _METADATA
        ]
        return decode_shard(header, [content[end + begin : end + stop] for begin, stop in offsets])
    except PermissionError:
        raise
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise CorruptCheckpointError(f"{path.name} cannot be read: {error}") from error


def decode_shard(header: bytes, buffers: Sequence[Any]) -> Shard:
    """Returns the shard that `encode_shard` has encoded.

    Args:
        header: The header.
        buffers: The bytes of each tensor. The arrays share their memory.

    >>> encoded = encode_shard(Shard({"bias": np.ones(2)}, {"step": 3}))
    >>> decode_shard(encoded.header, [tensor.tobytes() for tensor in encoded.tensors])
    Shard(tensors={'bias': array([1., 1.])}, metadata={'step': 3})
    """
    described = json.loads(header[_SIZE_BYTES:])
    content = described.pop(_METADATA)
    dtypes = json.loads(content["dtypes"])
    codes = {code: dtype for dtype, code in _CODES.items()}
    tensors = {}
    for (stored_name, entry), buffer in zip(described.items(), buffers, strict=True):
        name = _from_stored_name(stored_name)
        array = np.frombuffer(buffer, np.uint8).view(codes[entry["dtype"]])
        tensors[name] = _with_dtype(array.reshape(entry["shape"]), dtypes.get(name))
    return Shard(tensors, json.loads(content["metadata"]))


def dump_metadata(metadata: Json) -> str:
    """Returns `metadata` as JSON in ASCII. NaN and infinities are kept, in Python's spelling.

    Raises:
        ValueError: If JSON cannot represent it.

    >>> dump_metadata({"loss": [0.5, None]})
    '{"loss": [0.5, null]}'
    """
    try:
        text = json.dumps(metadata)
        if json.dumps(json.loads(text)) == text and isinstance(metadata, dict):
            return text
        problem = "two keys that are equal in JSON" if isinstance(metadata, dict) else f"a {type(metadata).__name__}"
    except (TypeError, ValueError, RecursionError) as error:
        problem = str(error)
    raise ValueError(
        f"The metadata of a checkpoint cannot be written as JSON. Received: {problem}. Expected: a dictionary "
        "of numbers, strings, booleans, None, lists and dictionaries with strings as keys. Store arrays as tensors, "
        "and convert NumPy's scalars with .item()."
    )


def _encode_header(content: Json) -> bytes:
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    if len(text) > _MAX_HEADER_BYTES:
        raise ValueError(
            f"A part of a checkpoint cannot be written. Received: names and metadata of {len(text):,} bytes. "
            f"Expected: at most {_MAX_HEADER_BYTES:,}, the limit of safetensors. Store large metadata as tensors."
        )
    return len(text).to_bytes(_SIZE_BYTES, "little") + text


class _StoredDtype(NamedTuple):
    code: str  # the name in the format
    dtype: np.dtype[Any]  # to which arrays are converted first: other byte orders
    is_bytes: bool  # whether the format lacks the dtype, so that bytes are stored


@functools.lru_cache(maxsize=100)
def _stored_dtype(dtype: np.dtype[Any]) -> _StoredDtype | None:
    """Returns how arrays of `dtype` are stored, `None` if they are not numeric."""
    try:
        if dtype.newbyteorder("=") != dtype_named(dtype.name):
            return None
    except (TypeError, AttributeError):
        return None
    if dtype.name not in _CODES:
        return _StoredDtype("U8", dtype.newbyteorder("="), is_bytes=True)
    return _StoredDtype(_CODES[dtype.name], dtype.newbyteorder("<"), is_bytes=False)


def _with_dtype(array: _Array, dtype: str | None) -> _Array:
    return array if dtype is None else array.reshape(-1).view(dtype_named(dtype)).reshape(array.shape[:-1])


def _to_stored_name(name: str) -> str:
    """Returns the name of a tensor in the file; names that are reserved or that UTF-8 cannot encode are escaped."""
    encodable = name.isascii() or not any("\ud800" <= character <= "\udfff" for character in name)
    is_plain = encodable and name != _METADATA and not name.startswith(_ESCAPE_PREFIX)
    return name if is_plain else _ESCAPE_PREFIX + json.dumps(name)


def _from_stored_name(stored: str) -> str:
    return str(json.loads(stored.removeprefix(_ESCAPE_PREFIX))) if stored.startswith(_ESCAPE_PREFIX) else stored
