"""The manifest: every changed bit is found, and another format is distinguished from damage."""

import dataclasses
import hashlib
import json

import pytest

from tfdist.checkpoint import manifest
from tfdist.checkpoint.errors import CorruptCheckpointError, OtherFormatError
from tfdist.checkpoint.manifest import FileRecord, Manifest

METADATA = {"step": 10, "loss": [0.1, float("inf"), -0.0], "name": "ü\ud800", "nested": {"empty": {}, "none": None}}
WRITTEN = Manifest(
    7, "a", 1, 1e9, {"shared.safetensors": FileRecord(10, "ab"), "rank-0.safetensors": FileRecord(0, "")}, METADATA
)


def test_it_comes_back():
    assert Manifest.from_bytes(WRITTEN.to_bytes()) == WRITTEN


def test_it_is_json_with_its_format():
    assert json.loads(WRITTEN.to_bytes())["format"] == manifest.FORMAT == 3


def test_one_that_lacks_ranks_has_another_format_than_others():
    lacking = dataclasses.replace(WRITTEN, num_ranks=3, missing_ranks=(1, 2))
    assert Manifest.from_bytes(lacking.to_bytes()) == lacking and lacking.saved_ranks == (0,)
    assert json.loads(lacking.to_bytes())["format"] == 5 and "missing_ranks" not in json.loads(WRITTEN.to_bytes())


def test_one_of_own_disks_says_what_is_where():
    files = {name: FileRecord(1, "") for name in ("shared.safetensors", "rank-0.safetensors", "rank-1.safetensors")}
    hosts = manifest.HostFiles("a", tuple(files)), manifest.HostFiles("b", ("shared.safetensors",))
    own = dataclasses.replace(WRITTEN, num_ranks=2, files=files, hosts=hosts, here=("shared.safetensors",))
    assert Manifest.from_bytes(own.to_bytes()) == own and own.files_here == own.here
    lacking = dataclasses.replace(own, num_ranks=3, missing_ranks=(2,))
    assert Manifest.from_bytes(lacking.to_bytes()) == lacking
    assert json.loads(own.to_bytes())["format"] == 6 and WRITTEN.files_here == tuple(WRITTEN.files)


def test_every_flipped_bit_is_found():
    data = WRITTEN.to_bytes()
    for position in range(len(data)):
        for bit in range(8):
            torn = bytearray(data)
            torn[position] ^= 1 << bit
            with pytest.raises(CorruptCheckpointError, match="its checksum differs"):
                Manifest.from_bytes(bytes(torn))


def test_every_truncation_and_addition_is_found():
    data = WRITTEN.to_bytes()
    for torn in [*(data[:length] for length in range(len(data))), data + b"\n", data + data, b" " + data]:
        with pytest.raises(CorruptCheckpointError):
            Manifest.from_bytes(torn)


@pytest.mark.parametrize("content", [b"[]", b"7", b"null", b'"a"', b"{}", b'{"checksum": 1}', b"[" * 10**5, b"\xff"])
def test_other_content_is_corrupt(content):
    with pytest.raises(CorruptCheckpointError):
        Manifest.from_bytes(content)


@pytest.mark.parametrize("number", [2, 7])
def test_another_format_is_named_whatever_the_rest_of_the_manifest(number):
    content = {"format": number, "unheard of": [1, 2]}
    checksum = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    data = json.dumps({**content, "checksum": checksum}, indent=1).encode() + b"\n"
    with pytest.raises(OtherFormatError, match=f"Received: format {number}. Expected: format 3 to 6"):
        Manifest.from_bytes(data)
    with pytest.raises(CorruptCheckpointError):
        Manifest.from_bytes(data.replace(f"{number},".encode(), b"8,", 1))
