"""What workers tell each other about their devices when a strategy is created, and what cannot work together."""

import ctypes
from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives.key_values import key_values

_DRIVER = "libcuda.so.1"
_UUID_BYTES = 16


def devices_of_workers(
    kind: str, number: int, rank: int, num_workers: int, name: str, *, use_nccl: bool
) -> tuple[int, ...]:
    """Returns the numbers of devices of all workers, by rank, each of which calls this.

    `kind` is the type of its devices, "CPU" or "GPU", `name` that of the exchange in the key-value store of the
    cluster.

    Raises:
        ValueError: See `numbers_of_devices`.
    """
    uuids = uuids_of_gpus() if kind == "GPU" and use_nccl else ()
    return numbers_of_devices(key_values.exchange(name, described(kind, number, uuids), rank, num_workers))


def described(kind: str, number: int, uuids: Sequence[str] = ()) -> str:
    """Returns the line about the devices of a worker, of type "CPU" or "GPU".

    `uuids` are the identities of physical GPUs, where no other worker may use them.
    """
    return f"{number} {kind} {','.join(uuids)}"


def numbers_of_devices(lines: Sequence[str]) -> tuple[int, ...]:
    """Returns the numbers of devices of the workers, whose lines are in the order of their ranks.

    Raises:
        ValueError: The devices are of several types, or workers use one GPU that they must not share.
    """
    numbers, kinds, uuids = zip(*(line.split(" ") for line in lines), strict=True)
    if len(set(kinds)) > 1:
        described_devices = ", ".join(f"worker {rank}: {numbers[rank]} {kind}" for rank, kind in enumerate(kinds))
        raise ValueError(
            f"All workers must compute on devices of one type. Received: {described_devices}. Expected: CPUs only "
            "or GPUs only. Hide the GPUs by CUDA_VISIBLE_DEVICES='' on all workers, or leave out the workers "
            "without GPUs."
        )
    users: dict[str, int] = {}
    for rank, names in enumerate(uuids):
        for uuid in filter(None, names.split(",")):
            if uuid in users:
                raise ValueError(
                    f"With NCCL workers cannot share a GPU. Received: workers {users[uuid]} and {rank} both use "
                    f"the GPU {uuid}. Expected: no GPU is used by two workers. Give each worker another one by "
                    "CUDA_VISIBLE_DEVICES, or leave NCCL out of `communication_options`: workers may share a GPU with "
                    "tfdist's own exchange."
                )
            users[uuid] = rank
    return tuple(int(number) for number in numbers)


def uuids_of_gpus() -> list[str]:
    """Returns the identities of the physical GPUs that TensorFlow uses in this process; none where they are unknown."""
    present = tf.config.list_physical_devices("GPU")
    try:
        known = _uuids_of_driver()
    except (OSError, AttributeError):
        return []
    if len(known) != len(present):  # TensorFlow leaves GPUs out that are too old
        return []
    visible = {device.name for device in tf.config.get_visible_devices("GPU")}
    return [uuid for device, uuid in zip(present, known, strict=True) if device.name in visible]


def _uuids_of_driver() -> list[str]:
    """Returns the UUIDs of the GPUs that CUDA_VISIBLE_DEVICES leaves, in CUDA's order, as `nvidia-smi -L` has them."""
    driver = ctypes.CDLL(_DRIVER)
    count, device = ctypes.c_int(), ctypes.c_int()
    uuid = (ctypes.c_ubyte * _UUID_BYTES)()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    uuids = []
    for index in range(count.value):
        if driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetUuid_v2(uuid, device):
            return []
        digits = bytes(uuid).hex()
        uuids.append("GPU-" + "-".join(digits[a:b] for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))))
    return uuids
