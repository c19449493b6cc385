"""What the workers of a cluster tell each other and agree on when they start, and what is set in their processes."""

import ctypes
import faulthandler
import json
import os
import pickle
import platform
import random
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfdist.cluster import new_seed, requested_workers
from tfdist.collectives.key_values import key_values
from tfdist.tensorflow_internals.runtime import global_seed
from tfdist.tensorflow_internals.xla_functions import leave_xla_to_users

_DRIVER = "libcuda.so.1"
_UUID_BYTES = 16
_CPU_FILE, _CPU_FLAGS = "/proc/cpuinfo", ("flags", "Features")


def agree_on_random_seed(rank: int, num_workers: int, name: str) -> None:
    """Sets the same seed for the global generators of TensorFlow, Python and NumPy on all workers.

    Each worker draws all batches and takes its part. With different seeds, some samples of an epoch would be seen twice
    and others never. All attempts of a run have the same seed, so a training that resumes after a failure sees the same
    order.

    A seed of TensorFlow that the user has set is kept. The generators of Python and NumPy are seeded only where they
    differ between workers, and nobody has seeded or used them since this module was imported. That is so where `tfdist
    run` has not seeded them before the program began.
    """
    states = _states_of_generators()
    unused = {kind: state == _STATES_AT_IMPORT[kind] for kind, state in states.items()}
    proposed = json.dumps([new_seed(os.environ), states, unused])
    everyone = [json.loads(proposal) for proposal in key_values.exchange(name, proposed, rank, num_workers)]
    seed = everyone[0][0]
    if global_seed() is None:
        tf.random.set_seed(seed)
    for kind, seed_generator in (("python", random.seed), ("numpy", np.random.seed)):
        differ = len({state[kind] for _, state, _ in everyone}) > 1
        if differ and all(is_unused[kind] for _, _, is_unused in everyone):
            seed_generator(seed)


def compare_cpus(rank: int, num_workers: int, name: str) -> None:
    """Leaves XLA to the users if workers have CPUs with different instructions, and their weights would differ."""
    cpus = key_values.exchange(name, str(cpu_instructions()), rank, num_workers)
    if different_workers := [worker for worker, cpu in enumerate(cpus) if cpu != cpus[0]]:
        leave_xla_to_users(different_workers)


def compare_plans(rank: int, num_workers: int, name: str, plan: str) -> None:
    """Checks that all workers have created their strategy by the same plan.

    Raises:
        ValueError: Another worker has another plan.
    """
    plans = key_values.exchange(name, plan, rank, num_workers)
    if different_workers := [worker for worker, worker_plan in enumerate(plans) if worker_plan != plans[0]]:
        raise ValueError(
            f"The workers have different plans. Received: {plans[0]} on worker 0, and {plans[different_workers[0]]} on "
            f"worker {different_workers[0]}. Expected: the same file on every host. Copy the plan of one host to all, "
            "or write it to a directory that they share."
        )


def default_micro_batches(workers: int) -> int:
    """Returns the quotient of requested and present workers, or 1 if that is not an integer."""
    full = requested_workers() or workers
    return full // workers if full % workers == 0 else 1


def _states_of_generators() -> dict[str, int]:
    states = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
    return {kind: zlib.crc32(pickle.dumps(state)) for kind, state in states.items()}


def devices_of_workers(
    kind: str, number: int, rank: int, num_workers: int, name: str, *, use_nccl: bool
) -> tuple[int, ...]:
    """Returns the numbers of devices of all workers, by rank, each of which calls this; see `numbers_of_devices`.

    `kind` is the type of its devices, "CPU" or "GPU", `name` that of the exchange in the key-value store.
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


_STATES_AT_IMPORT = _states_of_generators()


@contextmanager
def exit_on_timeout(seconds: float) -> Iterator[None]:
    """Ends this process, with a traceback, if the body takes longer than `seconds`.

    TensorFlow's start waits for its peers indefinitely, in C++ with Python's lock held: no other thread and no signal
    handler can run meanwhile. The timer of `faulthandler` needs neither.
    """
    try:
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.stderr.fileno())
    except (AttributeError, ValueError, OSError):  # standard error has no file descriptor: a notebook
        yield
        return
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def cpu_instructions() -> int:
    """Returns a number that is equal on CPUs with the same instructions."""
    try:
        lines = Path(_CPU_FILE).read_text().splitlines()
    except OSError:
        lines = []
    return _number_of(next((line for line in lines if line.startswith(_CPU_FLAGS)), ""))


def cpu_instructions_of(host: str) -> int:
    """Returns the number of `cpu_instructions` of another task, by its CPU device."""

    @tf.function(autograph=False)
    def flags() -> tf.Tensor:
        with tf.device(host):  # lines, because the file has no size that `tf.io.read_file` could read
            pattern = f"({'|'.join(_CPU_FLAGS)}).*"
            lines = tf.data.TextLineDataset(_CPU_FILE).filter(lambda line: tf.strings.regex_full_match(line, pattern))
            return lines.take(1).reduce(tf.constant(""), lambda _, line: line)

    try:
        flags_line = flags.get_concrete_function()().numpy()
    except tf.errors.NotFoundError:
        flags_line = b""
    return _number_of(flags_line.decode(errors="replace"))


def _number_of(flags: str) -> int:
    return zlib.crc32(" ".join(sorted((flags or platform.processor()).split())).encode())
