"""A shard as a safetensors file: everything is read back bit by bit, and other programs can read it."""

import json
import stat

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from tfdist.checkpoint import Shard
from tfdist.checkpoint.errors import CorruptCheckpointError
from tfdist.checkpoint.shard import encode_shard, map_shard, read_shard, write_shard

NUMPY = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 longdouble complex64 complex128"
ML = "bfloat16 float8_e4m3fn float8_e4m3b11fnuz float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz int4 uint4"
DTYPES = [*map(np.dtype, NUMPY.split()), *(np.dtype(getattr(ml_dtypes, name)) for name in ML.split())]
SHAPES = [(), (0,), (0, 3), (1,), (3,), (2, 3), (2, 1, 4)]


def random(dtype, shape):
    """Any bits, so also NaN with payloads, infinities, subnormals; as far as the dtype allows."""
    generator = np.random.default_rng(0)
    if dtype.kind == "b":
        return generator.integers(0, 2, shape).astype(bool)
    if dtype.name in ("int4", "uint4", "longdouble", "float128"):
        return generator.integers(0, 8, shape).astype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(generator.bytes(size), dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_every_dtype_and_shape_comes_back(tmp_path, assert_same, dtype):
    shard = Shard({str(shape): random(dtype, shape) for shape in SHAPES})
    write_shard(tmp_path / "file", encode_shard(shard))
    for read in map(read_shard, [tmp_path / "file"]), map(map_shard, [tmp_path / "file"] * 2):
        for found in read:
            assert_same(found, shard)
            for tensor in found.tensors.values():
                tensor[...] = np.zeros_like(tensor)  # may be written to, which changes no file


@pytest.mark.parametrize(
    "tensor",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.arange(6, dtype=">c16"),
        np.arange(24.0).reshape(4, 6)[::2, ::3],
        np.arange(6.0).reshape(2, 3).T,
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.broadcast_to(np.float32(5), (2, 3)),
        np.arange(6).astype(ml_dtypes.bfloat16)[::-2],
        np.float64(5),
    ],
)
def test_other_layouts_come_back_as_values(tmp_path, tensor):
    write_shard(tmp_path / "file", encode_shard(Shard({"a": tensor})))
    read = read_shard(tmp_path / "file").tensors["a"]
    np.testing.assert_array_equal(read, tensor, strict=False)
    assert read.shape == tensor.shape and read.dtype == tensor.dtype.newbyteorder("=")


NAMES = [
    "",
    "a/b.c:0",
    'quote"back\\slash\n\t\0',
    "ünïcode 権重 🎲",
    "__metadata__",
    "json:",
    'json:"a"',
    "\ud800",
    "x" * 10_000,
]


def test_names_may_hold_any_characters(tmp_path, assert_same):
    shard = Shard({name: np.array(index) for index, name in enumerate(NAMES)})
    write_shard(tmp_path / "file", encode_shard(shard))
    assert_same(read_shard(tmp_path / "file"), shard)
    bfloat16 = Shard({name: np.array(index, ml_dtypes.bfloat16) for index, name in enumerate(NAMES)})
    write_shard(tmp_path / "other", encode_shard(bfloat16))
    assert_same(read_shard(tmp_path / "other"), bfloat16)
    assert_same(map_shard(tmp_path / "other"), bfloat16)


def test_nothing_at_all_comes_back(tmp_path, assert_same):
    write_shard(tmp_path / "file", encode_shard(Shard({})))
    assert_same(read_shard(tmp_path / "file"), Shard({}, {}))
    assert_same(map_shard(tmp_path / "file"), Shard({}, {}))


def test_metadata_comes_back(tmp_path):
    metadata = {"a": [1, 2.5, None, True, "ü\ud800"], "big": 2**200, "nested": {"": {}}, "infinite": float("inf")}
    write_shard(tmp_path / "file", encode_shard(Shard({}, {**metadata, "nan": float("nan")})))
    read = read_shard(tmp_path / "file").metadata
    assert np.isnan(read.pop("nan")) and read == metadata


def test_other_programs_can_read_it(tmp_path):
    kernel = np.arange(6, dtype=np.float32).reshape(2, 3)
    write_shard(
        tmp_path / "file", encode_shard(Shard({"dense/kernel": kernel, "half": np.ones(3, ml_dtypes.bfloat16)}))
    )
    read = safetensors.numpy.load_file(tmp_path / "file")
    np.testing.assert_array_equal(read["dense/kernel"], kernel)
    assert read["half"].shape == (3, 2) and read["half"].dtype == np.uint8


def test_its_size_is_foreseen(tmp_path):
    for shard in (
        Shard({}),
        Shard({"a": np.zeros((1000, 1000))}, {"note": "ü" * 1000}),
        Shard({f"layer_{i}/" + "ü" * 100: np.zeros((1, 1, 1, 1, 1, 10**9, 0)) for i in range(2000)}),
        Shard({str(i): np.zeros((), ml_dtypes.bfloat16) for i in range(2000)}),
    ):
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        write_shard(path, encode_shard(shard))
        size = sum(tensor.nbytes for tensor in shard.tensors.values())
        assert size < path.stat().st_size == encode_shard(shard).size_bytes


def test_it_has_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "other").touch()
    write_shard(tmp_path / "file", encode_shard(Shard({"a": np.zeros(3)})))
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)


def test_a_file_is_never_replaced(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        write_shard(tmp_path / "file", encode_shard(Shard({})))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "tensor",
    [
        np.array(["text"]),
        np.array([b"bytes"]),
        np.array([None]),
        np.array(["2026-01-01"], "datetime64[D]"),
        np.zeros(2, [("a", int), ("b", float)]),
        np.zeros(2, "V4"),
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_other_dtypes_are_rejected(tensor):
    with pytest.raises(ValueError, match=r"cannot be written. Received: 'a' of dtype .* Expected: a string as name"):
        encode_shard(Shard({"a": tensor}))


@pytest.mark.parametrize(
    "metadata", [{"a": np.float32(1)}, {"a": {1, 2}}, {1: "a", "1": "b"}, {(1, 2): 3}, [1], None], ids=str
)
def test_metadata_that_is_not_json_is_rejected(metadata):
    with pytest.raises(ValueError, match=r"The metadata of a checkpoint cannot be written as JSON. Received: "):
        encode_shard(Shard({}, metadata))


def test_metadata_that_is_too_long_is_rejected(monkeypatch):
    monkeypatch.setattr("tfdist.checkpoint.shard._MAX_HEADER_BYTES", 1000)
    with pytest.raises(ValueError, match="Received: names and metadata of 1,0.. bytes. Expected: at most 1,000"):
        encode_shard(Shard({}, {"note": "a" * 990}))


def test_tensors_are_aligned(tmp_path):
    """Readers that map the file into memory need it."""
    tensors = {"a": np.zeros(3, np.int8), "b": np.zeros(5, np.float64), "c": np.zeros(1, np.float16)}
    write_shard(tmp_path / "file", encode_shard(Shard(tensors)))
    content = (tmp_path / "file").read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    stored = json.loads(content[8:begin])
    for name, tensor in tensors.items():
        assert (begin + stored[name]["data_offsets"][0]) % tensor.dtype.itemsize == 0, name


@pytest.mark.parametrize("read", [read_shard, map_shard])
@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\xff" * 100, b"PK\3\4"])
def test_other_files_are_rejected(tmp_path, content, read):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match="file cannot be read: "):
        read(tmp_path / "file")
    safetensors.numpy.save_file({"a": np.zeros(3)}, tmp_path / "foreign")
    with pytest.raises(CorruptCheckpointError, match="foreign cannot be read: "):
        read(tmp_path / "foreign")
    with pytest.raises(CorruptCheckpointError, match="none cannot be read: "):
        read(tmp_path / "none")
