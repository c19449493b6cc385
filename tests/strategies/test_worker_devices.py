import re

import pytest
import tensorflow as tf

from tfdist.strategies import worker_start


def _exchange(monkeypatch, kind, uuids, other_line, *, use_nccl=True):
    """Creates the devices of worker 1, whose GPUs have these UUIDs; worker 0 has sent `other_line`."""
    sent = []

    def exchanged(name, line, rank, workers):
        sent.append(line)
        return [other_line, line]

    monkeypatch.setattr(worker_start.key_values, "exchange", exchanged)
    monkeypatch.setattr(worker_start, "uuids_of_gpus", lambda: uuids)
    numbers = worker_start.devices_of_workers(kind, max(len(uuids), 1), 1, 2, "devices", use_nccl=use_nccl)
    return numbers, sent[0]


def test_nccl_with_two_workers_on_one_gpu_is_refused(monkeypatch):
    with pytest.raises(
        ValueError,
        match=re.escape("Received: workers 0 and 1 both use the GPU GPU-b. Expected: no GPU is used by two workers."),
    ):
        _exchange(monkeypatch, "GPU", ["GPU-b", "GPU-c"], worker_start.described("GPU", 2, ["GPU-a", "GPU-b"]))


def test_nccl_with_gpus_of_their_own_is_accepted(monkeypatch):
    numbers, _ = _exchange(monkeypatch, "GPU", ["GPU-c"], worker_start.described("GPU", 2, ["GPU-a", "GPU-b"]))
    assert numbers == (2, 1)


def test_workers_share_a_gpu_without_nccl(monkeypatch):
    numbers, line = _exchange(monkeypatch, "GPU", ["GPU-a"], worker_start.described("GPU", 1), use_nccl=False)
    assert numbers == (1, 1)
    assert "GPU-a" not in line


def test_unknown_identities_are_accepted(monkeypatch):
    assert _exchange(monkeypatch, "GPU", [], worker_start.described("GPU", 1))[0] == (1, 1)


def test_cpus_and_gpus_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"worker 0: 2 GPU, worker 1: 1 CPU\. Expected: CPUs only or GPUs only"):
        _exchange(monkeypatch, "CPU", [], worker_start.described("GPU", 2, ["GPU-a", "GPU-b"]))


class _Driver:
    """A driver with two GPUs, whose UUIDs begin with 10 and 11."""

    def cuInit(self, flags):
        return 0

    def cuDeviceGetCount(self, count):
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, device, index):
        device._obj.value = index
        return 0

    def cuDeviceGetUuid_v2(self, uuid, device):
        uuid[:] = bytes([16 + device.value, *range(1, 16)])
        return 0


@pytest.fixture
def two_gpus(monkeypatch):
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU") for index in range(2)]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: gpus[1:])
    return gpus


def test_uuids_are_those_of_visible_gpus_as_nvidia_smi_prints_them(monkeypatch, two_gpus):
    monkeypatch.setattr(worker_start.ctypes, "CDLL", lambda name: _Driver())
    assert worker_start.uuids_of_gpus() == ["GPU-11010203-0405-0607-0809-0a0b0c0d0e0f"]


def test_gpus_that_tensorflow_leaves_out_make_them_unknown(monkeypatch, two_gpus):
    monkeypatch.setattr(worker_start.ctypes, "CDLL", lambda name: _Driver())
    two_gpus.pop()
    assert worker_start.uuids_of_gpus() == []


def test_uuids_are_unknown_without_a_driver(monkeypatch, two_gpus):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(worker_start.ctypes, "CDLL", missing)
    assert worker_start.uuids_of_gpus() == []
